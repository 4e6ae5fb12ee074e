"""Norms: RMSNorm's forward, and the backward of RMSNorm and LayerNorm, in one pass over their tensors each.

Bytes per element of w bytes: 2 w forward; 3 w backward (x and dy read, dx written), 4 w if a residual's gradient is
added. Each program sums the weight gradients of its rows in fp32 registers, then torch sums over the programs: always
in the same order, without atomics. PROGRAMS and TURN are the same on every GPU, and so is that order.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from megazero.engine.kernels.triton.triton_options import options

Gradients = tuple[torch.Tensor, ...]

PROGRAMS = 256  # several per multiprocessor of today's GPUs; their sums are 1/8 of x's bytes at 4096 tokens of 16 bit
TURN = 2048, 4  # most elements, and rows, of a turn. One narrow row per turn would use little of the bandwidth


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
    """Program p computes groups p, p + programs, ... of ROWS rows. CENTERED: LayerNorm, with means and a bias."""
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


def _options(columns: int, rows: int = 1) -> dict[str, int]:
    """Options of a launch with whole rows per program."""
    block = triton.next_power_of_2(columns)
    return {"BLOCK": block, **options(rows * block, most_warps=16)}


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Kernels`."""
    columns = x.shape[-1]
    assert weight.is_contiguous() and weight.shape == (columns,), (weight.shape, weight.stride())
    x = x.contiguous()
    y = torch.empty_like(x)
    rstds = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    if x.numel():
        _rms_norm[(rstds.numel(),)](x, weight, y, rstds, columns, eps, **_options(columns))
    return y, rstds


def rms_norm_grad(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *others: Any) -> Gradients:
    """Return the gradients of x and of the weight; others: 1 / rms, residual."""
    return layer_norm_grad(dy, x, weight, None, *others)


def layer_norm_grad(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    residual: torch.Tensor | None,
) -> Gradients:
    """Return the gradients of x, of the weight and, unless `mean` is None, of the bias; the last two in fp32.

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
            CENTERED=mean is not None, ADDS=residual is not None, ROWS=together, **_options(columns, together),
        )  # fmt: skip
    return dx, *parts.sum(1).unbind()
