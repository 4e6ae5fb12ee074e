"""Small forms of an optimizer's numbers: moments in 16 or 8 bits, and master weights as bf16 and a remainder.

Moments are rounded at random, up or down to the next number of the form, so that they are right on average: with a
decay rate of 0.999, an update changes a moment by less than half a step of either form, and rounding to the nearest
would discard it.

Note [int8]: a code is the upper bits of a floating-point number that has few exponents: below the least one, steps are
equal, as in IEEE's subnormal numbers.

    form                        | mantissa bits | exponents | largest / smallest number above 0
    signed: first moments       | 4             | 7         | 2 x 2^6 x 2^4  =  2^11
    positive: second moments    | 3             | 31        | 2 x 2^30 x 2^3 =  2^34

BLOCK neighbours share a byte: the least exponent, such that their largest number just fits. Positive numbers have many
exponents because updates divide by their root, and never become 0. The numbers of a form with a lower least exponent
include those of a form with a higher one, up to its largest. So numbers that were rounded once are kept exactly when
they are rounded again, even if the block's least exponent is then lower: checkpoints have numbers, not codes.
"""

import math
from collections.abc import Callable

import torch

from megazero.engine.options.optimizers import BLOCK, State

FRACTION = 23  # bits of the mantissa in fp32
EXPONENT = 0xFF << FRACTION
HALF = 1 << 15  # half a step of bf16, in bits of fp32


New = Callable[[int, torch.dtype], torch.Tensor]  # returns zeros [n]


def carve(memory: torch.Tensor) -> New:
    """Return a function that takes tensors from zeros, uint8 [n], one after another.

    Those of bytes come from the end, so that the others are aligned.
    """

    def new(numel: int, dtype: torch.dtype) -> torch.Tensor:
        nonlocal memory
        num_bytes = numel * dtype.itemsize
        at = len(memory) - num_bytes if dtype.itemsize == 1 else num_bytes
        first, last = memory[:at], memory[at:]
        found, memory = (last, first) if dtype.itemsize == 1 else (first, last)
        return found.view(dtype)

    return new


class Wide:
    """Numbers of a flat slice in the dtype of master weights. The classes below keep them in other forms.

    Attributes:
        nbytes: memory of this form.
    """

    def __init__(self, data: torch.Tensor) -> None:
        self.data, self.nbytes = data, data.nbytes

    def read(self, part: slice) -> torch.Tensor:
        """Return numbers in the dtype of master weights, as a view if they are kept so, and else as a copy."""
        return self.data[part]

    def write(self, part: slice, values: torch.Tensor, bits: torch.Tensor | None) -> None:
        """Replace numbers; not needed after writing to a view from `read`.

        Args:
            bits: 16 random bits for each, int32.
        """
        self.data[part].copy_(values)


class BFloat16:
    """Numbers in bf16."""

    def __init__(self, numel: int, dtype: torch.dtype, new: New) -> None:
        self.data, self.dtype = new(numel, torch.bfloat16), dtype
        self.nbytes = self.data.nbytes

    def read(self, part: slice) -> torch.Tensor:
        return self.data[part].to(self.dtype)

    def write(self, part: slice, values: torch.Tensor, bits: torch.Tensor | None) -> None:
        assert bits is not None
        self.data[part].view(torch.int16).copy_(upper(values.float().view(torch.int32) + bits))


class Int8:
    """Numbers in 8 bits; see Note [int8]."""

    def __init__(self, numel: int, dtype: torch.dtype, new: New, positive: bool) -> None:
        self.dtype, self.positive, self.mantissa = dtype, positive, 3 if positive else 4
        self.codes = new(numel, torch.uint8 if positive else torch.int8)
        self.least = new(numel // BLOCK, torch.uint8).fill_(self.mantissa + 1)
        self.nbytes = self.codes.nbytes + self.least.nbytes
        codes = torch.arange(256) if positive else torch.arange(256).to(torch.int8).to(torch.int64)
        size = codes.abs()
        above = ((size >> self.mantissa) - 1).clamp(min=0)  # exponents above the least
        numbers = (size - (above << self.mantissa)) * 2.0 ** (above - self.mantissa) * codes.sign()
        self.numbers = numbers.float().to(self.codes.device)  # each code's value if the least exponent is 0

    @property
    def above(self) -> int:
        """Exponents above the least one."""
        return ((256 if self.positive else 128) >> self.mantissa) - 2

    def read(self, part: slice) -> torch.Tensor:
        found = self.numbers.index_select(0, self.codes[part].view(torch.uint8).int())
        least = self.least[_blocks(part)].int().bitwise_left_shift_(FRACTION).view(torch.float32)
        found.view(-1, BLOCK).mul_(least[:, None])
        return found.to(self.dtype)

    def write(self, part: slice, values: torch.Tensor, bits: torch.Tensor | None) -> None:
        assert bits is not None
        m, x = self.mantissa, values.float().view(-1, BLOCK)
        size = x if self.positive else x.abs()
        # exponent of the largest number, rounded up, so that the number fits with any bits
        largest = size.amax(1).view(torch.int32) + ((1 << FRACTION - m) - 1) >> FRACTION
        least = largest.sub_(self.above).clamp_(min=m + 1)
        exponent = (size.view(torch.int32) & EXPONENT).maximum((least << FRACTION)[:, None])
        steps = size / (exponent - (m << FRACTION)).view(torch.float32)  # less than 2^(m + 1); exact
        steps.add_(bits.view(-1, BLOCK), alpha=2.0**-16).floor_()
        codes = ((exponent >> FRACTION) - least[:, None] << m) + steps.int()
        if self.positive:
            codes = codes.maximum(x.view(torch.int32).clamp(max=1))  # numbers above 0 have bits above 0
        else:
            negative = x.view(torch.int32) >> 31  # 0 or -1
            codes.bitwise_xor_(negative).sub_(negative)
        self.codes[part].copy_(codes.view(-1))
        self.least[_blocks(part)].copy_(least)


class SplitMaster:
    """fp32 master weights as bf16 compute weights and the 16 bits that these lack.

    A compute weight is its master weight rounded to the nearest, and away from 0 in the middle: to the nearest even one
    there, 65,537 master weights would share a compute weight, which are more than 16 bits can number.
    """

    def __init__(self, weights: torch.Tensor) -> None:
        self.weights = weights
        self.rest = torch.zeros(weights.numel(), dtype=torch.int16, device=weights.device)
        self.nbytes = self.rest.nbytes

    def read(self, part: slice) -> torch.Tensor:
        bits = self.weights[part].view(torch.int16).int().bitwise_left_shift_(16)
        return bits.add_(self.rest[part]).view(torch.float32)

    def write(self, part: slice, values: torch.Tensor, bits: torch.Tensor | None) -> None:
        round_away(values, self.weights[part])
        self.rest[part].copy_(values.view(torch.int16)[::2])


def round_away(values: torch.Tensor, weights: torch.Tensor) -> None:
    """Round fp32 numbers to the nearest ones in bf16; away from 0 in the middle."""
    # to the bits of a GPU's NaN, 0x7FFFFFFF, half a step cannot be added
    values = values.nan_to_num(math.nan, math.inf, -math.inf)
    weights.view(torch.int16).copy_(upper(values.view(torch.int32).add_(HALF)))


def upper(x: torch.Tensor) -> torch.Tensor:
    """Return the upper halves of int32 numbers, as int16."""
    return x.view(torch.int16)[1::2]  # the upper halves on a little-endian machine


Kept = Wide | BFloat16 | Int8 | SplitMaster


def _blocks(part: slice) -> slice:
    return slice(part.start // BLOCK, part.stop // BLOCK)


def kept(state: State, numel: int, dtype: torch.dtype, new: New) -> Kept:
    """Return zeros in the form of a state. dtype: of master weights."""
    if state.precision == "int8":
        return Int8(numel, dtype, new, state.positive)
    if state.precision == "bf16":
        return BFloat16(numel, dtype, new)
    return Wide(new(numel, dtype))
