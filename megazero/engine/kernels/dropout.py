"""Dropout with masks by coordinate: the same masks in every layout.

A mask is a function of (seed, layer, site, sample, row, column). No generator keeps a state between two uses.

Note [masks by coordinate]: an element of a mask is an integer hash of its coordinates, in 32 bits that wrap around:

    k1, k2 = seed_of(seed, "dropout", sample, layer, site)  # keys of a sample, 63 bits
    a, b = mix(row ^ k1), mix(row ^ k2)                     # keys of a row
    x = a + column * GOLDEN
    x = (x ^ x >> 16) * 0x7FEB352D ^ b
    x = (x ^ x >> 15) * 0x846CA68B
    kept = x < threshold

- Any row of any sample can be computed alone, on any device.
- The last round is a bijection of x ^ b. So x is uniform over the keys, and an element is kept with the given
  probability to 2^-32. The rounds are those of lowbias32 (Wellons, "Prospecting for Hash Functions") without its last
  `x ^ x >> 16`, which mixes the lower half of the bits: the comparison depends on the upper ones. `mix` is lowbias32,
  then a factor.
- Two rows whose `a` differ by a few multiples of GOLDEN visit the same hash inputs, some columns apart. XORing the
  second key of the row between the rounds decorrelates them.
- torch has no unsigned 32-bit arithmetic. int32 wraps around in the same way. Its `>>` fills in copies of the sign bit,
  which are masked out. The comparison is signed: for a uniform x it keeps as many.
"""

import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megazero.engine.kernels.eager import is_stand_in
from megazero.engine.kernels.hashing import FIRST_ROUND, GOLDEN, SECOND_ROUND, mix_, round_, scalars, signed
from megazero.engine.kernels.initial_values import seed_of

# Elements of a mask that a core computes together. With fewer, calling torch takes most of the time
CORE_ELEMENTS = 1 << 18
GPU_ELEMENTS = 1 << 26  # few, large kernels with at most half a GB of scratch memory


class Rows(NamedTuple):
    """Consecutive rows of a sample's mask."""

    sample: int  # its global number
    first: int  # the first row's number in the sample
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
    """Return x * mask, plus the residual if there is one: contiguous. The mask is computed by chunks of rows."""
    columns, double = x.shape[-1], x.dtype == torch.float64
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    x, y = x.reshape(-1, columns), out.view(-1, columns)
    keys = _row_keys(segments, x.device)
    steps = torch.arange(columns, dtype=torch.int32, device=x.device).mul_(GOLDEN)
    # in fp64 the factor does not fit into 32 bits
    scale = struct.unpack("i", struct.pack("f", 1.0 if double else scale_of(probability)))
    last, factor = scalars(threshold_of(probability), *scale)
    each = _rows_together(x)
    scratch = torch.empty(2, min(each, len(x)), columns, dtype=torch.int32, device=x.device)
    for at in range(0, len(x), each):
        part = slice(at, at + each)
        a, b = keys[:, part]
        bits, spare = scratch[:, : len(a)]
        torch.add(steps, a, out=bits)
        round_(bits, spare, *FIRST_ROUND).bitwise_xor_(b)
        # to 0 or 1, then to the bits of a float factor, because torch's kernels for bools are several times slower
        round_(bits, spare, *SECOND_ROUND).le_(last).mul_(factor)
        torch.mul(x[part], bits.view(torch.float32), out=y[part])
    if double:
        out.mul_(scale_of(probability))
    return out if residual is None else out.add_(residual)


def threshold_of(probability: float) -> int:
    """Return the greatest hash, an int32, of an element that is kept."""
    count = max(1, round((1 - probability) * 2**32))  # number of the 2^32 hashes that keep an element
    return count - 1 - 2**31


def scale_of(probability: float) -> float:
    """Return the factor of elements that are kept."""
    return 1 / (1 - probability)


@dataclass(frozen=True)
class Dropout:
    """Dropout with masks by coordinate; see the note above. Masks are not saved: backward computes them again.

    A sample's mask is a matrix. For activations [s, h] the row is the position; for attention weights [n, s, s] it is
    head * s + query, so that a rank with some of the heads has consecutive rows. Rows and columns are below 2^31.
    """

    probability: float
    seed: int
    layer: int  # -1: the embedding
    site: str
    kernel: Kernel = eager

    def __call__(self, x: torch.Tensor, rows: tuple[Rows, ...] | None) -> torch.Tensor:
        """Return dropout(x). Elements become 0 or x / (1 - probability), rounded once.

        Args:
            x: any shape, seen as [R, C]: C its last dim, R the sum of the rows' counts.
            rows: None in evaluation: no dropout.
        """
        return x if self.probability == 0.0 or rows is None else _Dropout.apply(x, self, rows)

    def onto(self, residual: torch.Tensor, x: torch.Tensor, rows: tuple[Rows, ...] | None) -> torch.Tensor:
        """Return residual + dropout(x), below autograd; may overwrite x."""
        return x.add_(residual) if self.probability == 0.0 or rows is None else self.times(x, rows, residual)

    def grad(self, dy: torch.Tensor, rows: tuple[Rows, ...] | None) -> torch.Tensor:
        """Return the gradient of x, below autograd."""
        return dy if self.probability == 0.0 or rows is None else self.times(dy, rows)

    def mask(self, x: torch.Tensor, rows: tuple[Rows, ...]) -> torch.Tensor:
        """Return 0 or 1 / (1 - probability), in x's shape and dtype."""
        return self.times(torch.ones_like(x, memory_format=torch.contiguous_format), rows)

    def times(self, x: torch.Tensor, rows: tuple[Rows, ...], residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return x * mask (+ residual), contiguous."""
        assert x.numel() == x.shape[-1] * sum(r.count for r in rows), (x.shape, rows)
        assert all(0 <= r.first <= r.first + r.count < 1 << 31 for r in rows), rows
        return self.kernel(x, residual, _segments(self.seed, self.layer, self.site, rows), self.probability)


@functools.lru_cache(maxsize=1 << 12)  # the same in forward, recompute and backward
def _segments(seed: int, layer: int, site: str, rows: tuple[Rows, ...]) -> tuple[Segment, ...]:
    keys = [seed_of(seed, "dropout", r.sample, layer, site) for r in rows]
    return tuple(Segment(signed(k), signed(k >> 32), r.first, r.count) for k, r in zip(keys, rows, strict=True))


def _row_keys(segments: Sequence[Segment], device: torch.device) -> torch.Tensor:
    """Return a and b of each row, int32 [2, R, 1]."""
    keys = torch.empty(2, sum(s.count for s in segments), 1, dtype=torch.int32, device=device)
    at = 0
    for s in segments:
        numbers = torch.arange(s.first, s.first + s.count, dtype=torch.int32, device=device)[:, None]
        for half, out in zip(scalars(s.low, s.high), keys[:, at : at + s.count], strict=True):
            torch.bitwise_xor(numbers, half, out=out)
        at += s.count
    return mix_(keys, torch.empty_like(keys))


def _rows_together(x: torch.Tensor) -> int:
    """Return the number of rows of x [R, C] per chunk, which does not change the result."""
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
