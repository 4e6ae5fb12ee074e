"""GELU's gradient, by tanh, in place of the gradient that it is made of; with its sum over tokens, a bias' gradient.

Bytes per element of w bytes: 3 w, where torch's operators take 4 w: the sum reads the gradient again. Sums are in fp32:
by each program over every PROGRAMS-th row, in registers, and then over the programs by torch, always in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PROGRAMS = 1024  # over rows and columns; does not depend on the GPU
BLOCK = 1024  # columns of a program


@triton.jit
def _gelu_grad(dy, x, sums, rows, columns, A, B, BLOCK: tl.constexpr):
    """A block of columns, and rows p, p + programs, ..., per program; in place of dy, each element by one program."""
    program = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * columns + column
        given = tl.load(x + at, mask=inside, other=0.0)
        value, upper = given.to(tl.float32), tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        square = value * value
        # 1 + tanh(z) = 2 sigmoid(2 z)
        sigmoid = 1.0 / (1.0 + tl.exp(-value * (A + B * square)))
        out = upper * (sigmoid + value * sigmoid * (1.0 - sigmoid) * (A + 3.0 * B * square))
        total += out
        tl.store(dy + at, out.to(given.dtype), mask=inside)
    tl.store(sums + program.to(tl.int64) * columns + column, total, mask=inside)


def gelu_grad_(dy: torch.Tensor, x: torch.Tensor, a: float, b: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of x [T, f] in place of that of gelu(x), dy; and its sum over tokens [f], in fp32.

    Args:
        a, b: gelu(x) = x sigmoid(a x + b x^3).
    """
    rows, columns = x.shape
    assert dy.shape == x.shape and dy.dtype == x.dtype, (dy.shape, x.shape)
    assert dy.is_contiguous() and x.is_contiguous(), (dy.stride(), x.stride())
    block = min(triton.next_power_of_2(columns), BLOCK)
    blocks = triton.cdiv(columns, block)
    programs = max(1, min(rows, PROGRAMS // blocks))
    sums = torch.empty(programs, columns, dtype=torch.float32, device=x.device)
    _gelu_grad[(programs, blocks)](
        dy, x, sums, rows, columns, a, b, BLOCK=block, num_warps=max(1, min(4, block // 256)), enable_fp_fusion=False
    )
    return dy, sums.sum(0)
