"""SwiGLU's product silu(gate) * value, and its gradient, in one pass each.

Bytes per element of the result, of w bytes: 3 w forward; 5 w backward (gate, value and dy read, two gradients written).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MOST_COLUMNS = 1 << 29  # column numbers of the last block, of both halves, stay below 2^31


@triton.jit
def _swiglu(x, y, columns, BLOCK: tl.constexpr):
    """A row of x [rows, 2 columns] per program: gates, then values."""
    row = tl.program_id(0).to(tl.int64)
    gates = x + row * 2 * columns
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < columns
        given = tl.load(gates + column, mask=inside, other=0.0)
        gate = given.to(tl.float32)
        value = tl.load(gates + columns + column, mask=inside, other=0.0).to(tl.float32)
        out = gate / (1.0 + tl.exp(-gate)) * value
        tl.store(y + row * columns + column, out.to(given.dtype), mask=inside)


@triton.jit
def _swiglu_grad(dy, x, columns, BLOCK: tl.constexpr):
    """A row per program, in place of x."""
    row = tl.program_id(0).to(tl.int64)
    gates = x + row * 2 * columns
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < columns
        given = tl.load(gates + column, mask=inside, other=0.0)
        gate = given.to(tl.float32)
        value = tl.load(gates + columns + column, mask=inside, other=0.0).to(tl.float32)
        upper = tl.load(dy + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        dvalue = upper * gate * sigmoid
        dgate = upper * value * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        tl.store(gates + column, dgate.to(given.dtype), mask=inside)
        tl.store(gates + columns + column, dvalue.to(given.dtype), mask=inside)


def _sizes(columns: int) -> dict[str, int]:
    block = min(triton.next_power_of_2(columns), 2048)
    return {"BLOCK": block, "num_warps": max(1, min(8, block // 256)), "enable_fp_fusion": False}


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """[.., 2 f], gates and values -> silu(gates) * values [.., f], rounded once."""
    columns = x.shape[-1] // 2
    assert x.shape[-1] == 2 * columns < 2 * MOST_COLUMNS, x.shape
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], columns)
    if y.numel():
        _swiglu[(y.numel() // columns,)](x, y, columns, **_sizes(columns))
    return y


def swiglu_grad_(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of x [.., 2 f] in place of x, of that of the result, [.., f]."""
    columns = x.shape[-1] // 2
    assert dy.shape == (*x.shape[:-1], columns) and dy.dtype == x.dtype, (dy.shape, x.shape)
    assert x.is_contiguous(), x.stride()
    if dy.numel():
        _swiglu_grad[(dy.numel() // columns,)](dy.contiguous(), x, columns, **_sizes(columns))
    return x
