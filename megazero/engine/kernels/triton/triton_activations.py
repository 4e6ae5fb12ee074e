"""GELU's gradient with its sum over tokens; SwiGLU and its gradient. One pass over memory each.

Bytes per element of w bytes:
- GELU's gradient 3 w. torch's operators take 4 w, because the sum, a bias' gradient, reads the gradient again.
- SwiGLU 3 w per element of the result, its gradient 5 w: gate, value and dy are read, two gradients written.
"""

import torch
import triton
import triton.language as tl

from megazero.engine.kernels.eager import GELU_A, GELU_B
from megazero.engine.kernels.triton.triton_options import block_options

# programs of GELU's gradient, over rows and columns; constant, so that every GPU sums in the same order
PROGRAMS = 1024
GELU_BLOCK, SWIGLU_BLOCK = 1024, 2048  # columns of a program
MOST_COLUMNS = 1 << 29  # columns of SwiGLU's result: the column numbers of both halves stay below 2^31


@triton.jit
def _gelu_grad(dy, x, sums, rows, columns, A, B, BLOCK: tl.constexpr):
    """Program (p, q) computes rows p, p + programs, ... of the q-th block of columns, in place of dy."""
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


def gelu_grad_(dy: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of x [T, f] in place of dy, that of gelu(x); and its sum over tokens [f], in fp32.

    Each program sums its rows in registers, then torch sums over the programs: always in the same order.
    """
    rows, columns = x.shape
    assert dy.shape == x.shape and dy.dtype == x.dtype, (dy.shape, x.shape)
    assert dy.is_contiguous() and x.is_contiguous(), (dy.stride(), x.stride())
    options = block_options(columns, GELU_BLOCK)
    blocks = triton.cdiv(columns, options["BLOCK"])
    programs = max(1, min(rows, PROGRAMS // blocks))
    sums = torch.empty(programs, columns, dtype=torch.float32, device=x.device)
    _gelu_grad[(programs, blocks)](dy, x, sums, rows, columns, GELU_A, GELU_B, **options)
    return dy, sums.sum(0)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """[.., 2 f], gates and values -> silu(gates) * values [.., f], rounded once."""
    columns = x.shape[-1] // 2
    assert x.shape[-1] == 2 * columns < 2 * MOST_COLUMNS, x.shape
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], columns)
    if y.numel():
        _swiglu[(y.numel() // columns,)](x, y, columns, **block_options(columns, SWIGLU_BLOCK))
    return y


def swiglu_grad_(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of x [.., 2 f] in place of x; dy [.., f]."""
    columns = x.shape[-1] // 2
    assert dy.shape == (*x.shape[:-1], columns) and dy.dtype == x.dtype, (dy.shape, x.shape)
    assert x.is_contiguous(), x.stride()
    if dy.numel():
        _swiglu_grad[(dy.numel() // columns,)](dy.contiguous(), x, columns, **block_options(columns, SWIGLU_BLOCK))
    return x
