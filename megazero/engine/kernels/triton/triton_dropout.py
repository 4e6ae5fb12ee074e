"""Dropout in one pass: the hash of Note [masks by coordinate] (`engine.kernels.dropout`), with the same bits.

Bytes per element of w bytes: 2 w, for x and y; 3 w with a residual. Nothing else is kept or moved: the samples' keys
are arguments of the launch, so that the launch does not wait for a copy to the device.
"""

import torch
import triton
import triton.language as tl

from megazero.engine.kernels.triton.triton_options import block_options

SEGMENTS = 8  # per launch
BLOCK = 2048  # columns of a turn
MOST_COLUMNS = 1 << 30  # column numbers of the last block stay below 2^31
PER_SEGMENT = [f"{name}{i}" for i in range(SEGMENTS) for name in ("low", "high", "shift", "end")]


@triton.jit
def _first_round(x):
    return (x ^ (x >> 16)) * 0x7FEB352D


@triton.jit
def _second_round(x):
    return (x ^ (x >> 15)) * 0x846CA68B


@triton.jit
def _mix(x):
    return _first_round(_second_round(_first_round(x)))


@triton.jit
def _pick(row, end, low, high, shift, low_after, high_after, shift_after):
    """The values of a segment if `row` is before its end; else those of the segments after it."""
    before = row < end
    return (
        tl.where(before, low, low_after),
        tl.where(before, high, high_after),
        tl.where(before, shift, shift_after),
    )


# Without specialization: Triton would compile another kernel for every argument that happens to be a multiple of 16.
@triton.jit(do_not_specialize=["last", *PER_SEGMENT])
def _dropout(
    x, residual, y, columns, last, factor,
    low0, high0, shift0, end0, low1, high1, shift1, end1, low2, high2, shift2, end2, low3, high3, shift3, end3,
    low4, high4, shift4, end4, low5, high5, shift5, end5, low6, high6, shift6, end6, low7, high7, shift7, end7,
    ADDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row of x [R, columns] per program. A row's number in its sample is its number in x, plus `shift`."""
    row = tl.program_id(0)
    low, high, shift = low7, high7, shift7
    low, high, shift = _pick(row, end6, low6, high6, shift6, low, high, shift)
    low, high, shift = _pick(row, end5, low5, high5, shift5, low, high, shift)
    low, high, shift = _pick(row, end4, low4, high4, shift4, low, high, shift)
    low, high, shift = _pick(row, end3, low3, high3, shift3, low, high, shift)
    low, high, shift = _pick(row, end2, low2, high2, shift2, low, high, shift)
    low, high, shift = _pick(row, end1, low1, high1, shift1, low, high, shift)
    low, high, shift = _pick(row, end0, low0, high0, shift0, low, high, shift)
    number = (row + shift).to(tl.uint32, bitcast=True)
    a = _mix(number ^ low.to(tl.uint32, bitcast=True))
    b = _mix(number ^ high.to(tl.uint32, bitcast=True))
    start = row.to(tl.int64) * columns
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < columns
        value = tl.load(x + start + column, mask=inside, other=0.0)
        bits = a + column.to(tl.uint32, bitcast=True) * 0x9E3779B1
        bits = _second_round(_first_round(bits) ^ b)
        kept = bits.to(tl.int32, bitcast=True) <= last
        out = (value.to(tl.float32) * tl.where(kept, factor, 0.0)).to(value.dtype)
        if ADDS:
            other = tl.load(residual + start + column, mask=inside, other=0.0)
            out = (other.to(tl.float32) + out.to(tl.float32)).to(value.dtype)
        tl.store(y + start + column, out, mask=inside)


def dropout(
    x: torch.Tensor, residual: torch.Tensor | None, segments: list[int], last: int, factor: float
) -> torch.Tensor:
    """Return dropout(x), or residual + dropout(x): contiguous, each rounded as torch's two operators would.

    Args:
        x: any shape, seen as [R, C]; fp32, bf16 or fp16.
        segments: low, high, first and count of each `engine.kernels.dropout.Segment`.
        last: an element is kept if its hash, an int32, is at most `last`.
        factor: of kept elements.
    """
    assert x.dtype in (torch.float32, torch.bfloat16, torch.float16), x.dtype
    columns = x.shape[-1]
    assert columns < MOST_COLUMNS, x.shape
    assert residual is None or (residual.shape == x.shape and residual.dtype == x.dtype), (residual, x.shape, x.dtype)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return y
    flat = [None if t is None else t.reshape(-1, columns).contiguous() for t in (x, residual, y)]
    begun = 0
    filled = [segments[i : i + 4] for i in range(0, len(segments), 4) if segments[i + 3]]
    for group in (filled[i : i + SEGMENTS] for i in range(0, len(filled), SEGMENTS)):
        arguments, row = [], 0
        for low, high, first, count in group:
            arguments += [low, high, first - row, row + count]
            row += count
        arguments += arguments[-4:] * (SEGMENTS - len(group))
        parts = [t if t is None or row == len(t) else t[begun : begun + row] for t in flat]
        _dropout[(row,)](
            *parts, columns, last, factor, *arguments, ADDS=residual is not None, **block_options(columns, BLOCK)
        )
        begun += row
    return y
