"""Norms: RMSNorm's forward, and the backward of RMSNorm and LayerNorm, in one pass over their tensors each.

Bytes per element of w bytes: 2 w forward; 3 w backward (x and dy read, dx written), 4 w if a residual's gradient is
added. Weight gradients are summed by each program over every PROGRAMS-th group of rows, in registers, and then over the
programs by torch: always in the same order, without atomics. Neither PROGRAMS nor TURN depends on the GPU. Sums are in
fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PROGRAMS = 256  # several per multiprocessor of today's GPUs; their sums are 1/8 of x's bytes at 4096 tokens of 16 bit
TURN = 2048, 4  # most elements, and rows, of a turn: narrow rows alone would leave most of the memory's rate unused


@triton.jit
def _rms_norm(x, weight, y, rstds, columns, eps, BLOCK: tl.constexpr):
    """A row of x [rows, columns] per program: rounded to x's type before the weight, as torch's operators do."""
    row = tl.program_id(0)
    start = row.to(tl.int64) * columns
    column = tl.arange(0, BLOCK)
    inside = column < columns
    given = tl.load(x + start + column, mask=inside, other=0.0)
    value = given.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(value * value, 0) / columns + eps)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    normed = (value * rstd).to(given.dtype).to(tl.float32)
    tl.store(y + start + column, (normed * scale).to(given.dtype), mask=inside)
    tl.store(rstds + row, rstd)


@triton.jit
def _norm_grad(
    dy, x, weight, means, rstds, residual, dx, dweights, dbiases, rows, columns,
    CENTERED: tl.constexpr, ADDS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Groups of ROWS rows p, p + programs, ... by program p. CENTERED: LayerNorm, with a mean and a bias. ADDS: a
    residual.
    """
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)[None, :]
    scale = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    dweight = tl.zeros((ROWS, BLOCK), tl.float32)
    dbias = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(program * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < columns)
        at = row.to(tl.int64) * columns + column
        given = tl.load(x + at, mask=inside, other=0.0)
        upper = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        value = given.to(tl.float32)
        rstd = tl.load(rstds + row, mask=row < rows, other=0.0).to(tl.float32)
        if CENTERED:
            value = tl.where(inside, value - tl.load(means + row, mask=row < rows, other=0.0).to(tl.float32), 0.0)
        normed = value * rstd
        dweight += upper * normed
        dnormed = upper * scale
        lower = dnormed - normed * (tl.sum(dnormed * normed, 1) / columns)[:, None]
        if CENTERED:
            dbias += upper
            lower -= (tl.sum(dnormed, 1) / columns)[:, None]
        lower *= rstd
        if ADDS:
            lower += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + at, lower.to(given.dtype), mask=inside)
    to = program.to(tl.int64) * columns + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < columns
    tl.store(dweights + to, tl.sum(dweight, 0), mask=inside)
    if CENTERED:
        tl.store(dbiases + to, tl.sum(dbias, 0), mask=inside)


def _sizes(columns: int, rows: int = 1) -> dict[str, int]:
    """Options of a launch with whole rows per program, 8 elements of them per thread, or 16 of the widest."""
    block = triton.next_power_of_2(columns)
    return {"BLOCK": block, "num_warps": max(1, min(16, rows * block // 256)), "enable_fp_fusion": False}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """See `eager.rms_norm`."""
    columns = x.shape[-1]
    assert weight.is_contiguous() and weight.shape == (columns,), (weight.shape, weight.stride())
    x = x.contiguous()
    y = torch.empty_like(x)
    rstds = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    if x.numel():
        _rms_norm[(rstds.numel(),)](x, weight, y, rstds, columns, eps, **_sizes(columns))
    return y, rstds


def norm_grad(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the gradients of x, of the weight and of the bias (None without a mean), the last two in fp32.

    `residual`, another gradient of x, is added to its gradient before that is rounded.
    """
    columns = x.shape[-1]
    x, dy = x.contiguous(), dy.contiguous()
    assert weight.is_contiguous() and rstd.is_contiguous(), (weight.stride(), rstd.stride())
    assert mean is None or mean.is_contiguous(), mean
    assert dy.shape == x.shape and dy.dtype == x.dtype and rstd.numel() * columns == x.numel(), (dy.shape, x.shape)
    if residual is not None:
        assert residual.shape == x.shape and residual.dtype == x.dtype, (residual.shape, x.shape)
        residual = residual.contiguous()
    dx = torch.empty_like(x)
    rows = rstd.numel()
    most, together = TURN
    together = max(1, min(together, most // triton.next_power_of_2(columns)))
    programs = min(triton.cdiv(rows, together), PROGRAMS)
    parts = torch.empty(1 if mean is None else 2, programs, columns, dtype=torch.float32, device=x.device)
    if rows:
        _norm_grad[(programs,)](
            dy, x, weight, mean, rstd, residual, dx, parts[0], parts[-1], rows, columns,
            CENTERED=mean is not None, ADDS=residual is not None, ROWS=together, **_sizes(columns, together),
        )  # fmt: skip
    sums = parts.sum(1)
    return dx, sums[0], None if mean is None else sums[1]
