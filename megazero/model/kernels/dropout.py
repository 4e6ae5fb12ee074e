"""Random numbers by coordinate: the same values in every layout.

Initial weights are drawn by (seed, global name, block of the global tensor); dropout masks are a function of (seed,
layer, site, sample, row, column). No generator has a state that lives from one use to the next.

Note [masks by coordinate]: an element of a mask is an integer hash of its coordinates, in 32 bits that wrap:

    k1, k2 = seed_of(seed, "dropout", sample, layer, site)  # of a sample, 63 bits
    a, b = mix(row ^ k1), mix(row ^ k2)                     # of a row
    x = a + column * GOLDEN
    x = (x ^ x >> 16) * 0x7FEB352D ^ b
    x = (x ^ x >> 15) * 0x846CA68B
    kept = x < threshold

- Any row of any sample can be made alone, on any device: nothing depends on how many others are made.
- What follows b is a bijection, so over the keys x is uniform, and an element is kept with the probability asked for,
  to 2^-32. The mixing is lowbias32's (Wellons, "Prospecting for Hash Functions") without its last `x ^ x >> 16`: that
  stirs the lower half, which the comparison hardly looks at. `mix` is lowbias32, then a factor.
- Rows whose `a` are a few multiples of GOLDEN apart walk over the same x, one some columns behind the other. Hence b in
  the middle: what they share is stirred once more, for each row in another way.
- torch has no unsigned 32-bit arithmetic. int32 wraps as it should on CPU and GPU; its `>>` repeats the sign, so what
  it filled in is cut off; the comparison is signed, which for a uniform x is as good.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megazero.model.initial_values import seed_of
from megazero.model.kernels.eager import is_stand_in

CORE_ELEMENTS = 1 << 18  # of a mask, made together by a core: less, and calling torch costs more than its work
GPU_ELEMENTS = 1 << 26  # few, large kernels, and yet no more than half a GB of scratch


def _signed(value: int) -> int:
    """The lowest 32 bits, as an int32."""
    return (value & 0xFFFFFFFF ^ 1 << 31) - (1 << 31)


def _scalars(*values: int) -> tuple[torch.Tensor, ...]:
    """The lowest 32 bits of each: int32 of no dimensions, which any device takes. A Python number costs 2 us more."""
    return torch.tensor([_signed(v) for v in values], dtype=torch.int32, device="cpu").unbind()


(GOLDEN,) = _scalars(0x9E3779B1)  # 2^32 / the golden ratio: neighbours get far apart
# Of lowbias32: a shift, the bits that it does not fill, an odd factor.
FIRST_ROUND, SECOND_ROUND = _scalars(16, 0xFFFF, 0x7FEB352D), _scalars(15, 0x1FFFF, 0x846CA68B)


class Rows(NamedTuple):
    """Consecutive rows of a sample's mask."""

    sample: int  # its global number
    first: int  # the first row, within the sample
    count: int


class Segment(NamedTuple):
    """Consecutive rows of a sample's mask, with both halves of the sample's key as int32."""

    low: int
    high: int
    first: int
    count: int


# (x [R, C] of any shape, a residual like x or None, the R rows of the mask, probability) -> residual + dropout(x)
Kernel = Callable[[torch.Tensor, torch.Tensor | None, Sequence[Segment], float], torch.Tensor]


def eager(
    x: torch.Tensor, residual: torch.Tensor | None, segments: Sequence[Segment], probability: float
) -> torch.Tensor:
    """Return x * mask, plus the residual if there is one: contiguous.

    The mask is made and used a chunk of rows at a time: it is nowhere whole.
    """
    columns, double = x.shape[-1], x.dtype == torch.float64
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    x, y = x.reshape(-1, columns), out.view(-1, columns)
    keys = _row_keys(segments, x.device)
    steps = torch.arange(columns, dtype=torch.int32, device=x.device).mul_(GOLDEN)
    # fp64: 32 bits do not hold its factor
    scale = struct.unpack("i", struct.pack("f", 1.0 if double else scale_of(probability)))
    last, factor = _scalars(threshold_of(probability), *scale)
    each = _rows_together(x)
    scratch = torch.empty(2, min(each, len(x)), columns, dtype=torch.int32, device=x.device)
    for at in range(0, len(x), each):
        part = slice(at, at + each)
        a, b = keys[:, part]
        bits, spare = scratch[:, : len(a)]
        torch.add(steps, a, out=bits)
        _round_(bits, spare, *FIRST_ROUND).bitwise_xor_(b)
        # To 0 or 1, then to the bits of a factor: torch's kernels for bools are several times slower.
        _round_(bits, spare, *SECOND_ROUND).le_(last).mul_(factor)
        torch.mul(x[part], bits.view(torch.float32), out=y[part])
    if double:
        out.mul_(scale_of(probability))
    return out if residual is None else out.add_(residual)


def threshold_of(probability: float) -> int:
    """Return the last of the int32, in their order, that is kept."""
    count = max(1, round((1 - probability) * 2**32))  # of all int32, so many are kept
    return count - 1 - 2**31


def scale_of(probability: float) -> float:
    """Return the factor of elements that are kept."""
    return 1 / (1 - probability)


@dataclass(frozen=True)
class Dropout:
    """Dropout with masks by coordinate; see the note above. No mask is kept: backward makes it again.

    A sample's mask is a matrix. For activations [s, h] a row is a position; for attention weights [n, s, s] row
    head * s + query, so that a rank which holds some of the heads holds consecutive rows. Row numbers end below 2^31,
    and a row has at most 2^31 - 1 columns.
    """

    probability: float
    seed: int
    layer: int  # -1: the embedding
    site: str
    kernel: Kernel = eager

    def __call__(self, x: torch.Tensor, rows: tuple[Rows, ...] | None) -> torch.Tensor:
        """x of any shape, seen as [R, C]: C its last dim, R the sum of the rows' counts. `rows` None: evaluation.

        Elements of x become 0 or x / (1 - probability), rounded once; the factor is in fp32, or of fp64 in fp64.
        """
        return x if self.probability == 0.0 or rows is None else _Dropout.apply(x, self, rows)

    def onto(self, residual: torch.Tensor, x: torch.Tensor, rows: tuple[Rows, ...] | None) -> torch.Tensor:
        """Residual + dropout(x), below autograd; x may be overwritten."""
        return x.add_(residual) if self.probability == 0.0 or rows is None else self.times(x, rows, residual)

    def grad(self, dy: torch.Tensor, rows: tuple[Rows, ...] | None) -> torch.Tensor:
        """Return the gradient of x, below autograd."""
        return dy if self.probability == 0.0 or rows is None else self.times(dy, rows)

    def mask(self, x: torch.Tensor, rows: tuple[Rows, ...]) -> torch.Tensor:
        """0 or 1 / (1 - probability), in x's shape and dtype."""
        return self.times(torch.ones_like(x, memory_format=torch.contiguous_format), rows)

    def times(self, x: torch.Tensor, rows: tuple[Rows, ...], residual: torch.Tensor | None = None) -> torch.Tensor:
        """x * mask (+ residual), contiguous."""
        assert x.numel() == x.shape[-1] * sum(r.count for r in rows), (x.shape, rows)
        assert all(0 <= r.first <= r.first + r.count < 1 << 31 for r in rows), rows
        return self.kernel(x, residual, _segments(self.seed, self.layer, self.site, rows), self.probability)


@functools.lru_cache(maxsize=1 << 12)  # forward, recompute and backward ask for the same
def _segments(seed: int, layer: int, site: str, rows: tuple[Rows, ...]) -> tuple[Segment, ...]:
    keys = [seed_of(seed, "dropout", r.sample, layer, site) for r in rows]
    return tuple(Segment(_signed(k), _signed(k >> 32), r.first, r.count) for k, r in zip(keys, rows, strict=True))


def _row_keys(segments: Sequence[Segment], device: torch.device) -> torch.Tensor:
    """a and b of each row: int32 [2, R, 1]."""
    keys = torch.empty(2, sum(s.count for s in segments), 1, dtype=torch.int32, device=device)
    at = 0
    for s in segments:
        numbers = torch.arange(s.first, s.first + s.count, dtype=torch.int32, device=device)[:, None]
        for half, out in zip(_scalars(s.low, s.high), keys[:, at : at + s.count], strict=True):
            torch.bitwise_xor(numbers, half, out=out)
        at += s.count
    spare = torch.empty_like(keys)
    for constants in (FIRST_ROUND, SECOND_ROUND, FIRST_ROUND):
        _round_(keys, spare, *constants)
    return keys


def _round_(
    x: torch.Tensor, spare: torch.Tensor, shift: torch.Tensor, low: torch.Tensor, factor: torch.Tensor
) -> torch.Tensor:
    """x = (x ^ x >> shift) * factor, as if x were unsigned; `low` has the bits that the shift does not fill."""
    torch.bitwise_right_shift(x, shift, out=spare)
    return x.bitwise_xor_(spare.bitwise_and_(low)).mul_(factor)


def _rows_together(x: torch.Tensor) -> int:
    """Return the number of rows of x [R, C] that are worked on together; the result does not depend on it."""
    if is_stand_in(x):
        return len(x)
    elements = CORE_ELEMENTS * torch.get_num_threads() if x.device.type == "cpu" else GPU_ELEMENTS
    return max(1, elements // x.shape[1])


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dropout, rows):
        ctx.dropout, ctx.rows = dropout, rows
        return dropout.times(x, rows)

    @staticmethod
    def backward(ctx, dy):
        return ctx.dropout.times(dy, ctx.rows), None, None
