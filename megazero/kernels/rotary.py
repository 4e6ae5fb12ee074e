"""Rotary positions: a pair of dims of a head is rotated by the angle position x base^(-2 i / r), for pair i of r / 2.

The pairs are of the first r of the d dims; the others stay. Usually dims i and i + r/2 are a pair, in GPT-J 2 i and
2 i + 1 (interleaved).

Shapes: b micro-batch, s sequence, d head dim, r rotated dims.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

# Llama 3.1's scaling: frequencies with fewer than LOW_FREQUENCY turns in the trained length are divided by the factor,
# those with more than HIGH_FREQUENCY turns stay.
LOW_FREQUENCY, HIGH_FREQUENCY = 1.0, 4.0
# YaRN's: dims with fewer than SLOW turns are divided, those with more than FAST stay.
SLOW, FAST = 1.0, 32.0


class RotaryScaling(NamedTuple):
    """A change of the frequencies, for contexts longer than those of training."""

    kind: str  # llama3, linear or yarn
    factor: float
    trained_length: int  # of the contexts; linear does not depend on it


@dataclass(frozen=True)
class Rotary:
    """The angles of one model. They are fp32 in every precision, as in published checkpoints."""

    dim: int  # r; 0: nothing is rotated
    base: float
    scaling: RotaryScaling | None = None
    interleaved: bool = False

    def frequencies(self, device: torch.device) -> torch.Tensor:
        """Radians per position, [r/2]."""
        exponents = torch.arange(0, self.dim, 2, dtype=torch.int64, device=device).float() / self.dim
        found = 1.0 / self.base**exponents
        if self.scaling is None:
            return found
        kind, factor, length = self.scaling
        if kind == "linear":
            return found / factor
        if kind == "yarn":
            kept = 1 - _ramp(self.dim, *(_dim_of(turns, self.dim, self.base, length) for turns in (FAST, SLOW)))
            kept = kept.to(device)
            return 1.0 / (factor * self.base**exponents) * (1 - kept) + found * kept
        lengths = 2 * math.pi / found
        smooth = (length / lengths - LOW_FREQUENCY) / (HIGH_FREQUENCY - LOW_FREQUENCY)
        between = (1 - smooth) * found / factor + smooth * found
        scaled = torch.where(lengths > length / LOW_FREQUENCY, found / factor, found)
        middle = (lengths <= length / LOW_FREQUENCY) & (lengths >= length / HIGH_FREQUENCY)
        return torch.where(middle, between, scaled)

    @property
    def magnitude(self) -> float:
        """Factor of rotated queries and keys: YaRN's, against scores that longer contexts spread."""
        yarn = self.scaling is not None and self.scaling.kind == "yarn"
        return 0.1 * math.log(self.scaling.factor) + 1 if yarn and self.scaling else 1.0

    def tables(self, length: int, dtype: torch.dtype, device: torch.device) -> RotaryTables:
        """Return the tables of positions 0 to length - 1."""
        angles = torch.arange(length, device=device)[:, None, None].float() * self.frequencies(device)
        cos, sin = ((turned * self.magnitude).to(dtype) for turned in (angles.cos(), angles.sin()))
        twice = cos.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat([cos, cos], dim=-1)
        return RotaryTables(twice, sin, self.interleaved)


def _dim_of(turns: float, dim: int, base: float, length: int) -> float:
    """Return the number of the pair whose angle makes `turns` turns in `length` tokens."""
    return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))


def _ramp(dim: int, low: float, high: float) -> torch.Tensor:
    """Return [dim / 2] numbers: 0 up to pair `low`, 1 from `high` on."""
    first, last = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
    return ((torch.arange(dim // 2) - first) / (last - first or 0.001)).clamp(0, 1)


class RotaryTables(NamedTuple):
    """Cosines and sines of positions [..], in the precision of the tensors to rotate."""

    cos: torch.Tensor  # [.., 1, r], each cosine twice: for both dims of a pair
    sin: torch.Tensor  # [.., 1, r/2]
    interleaved: bool = False

    def at(self, positions: torch.Tensor | None, length: int) -> RotaryTables:
        """Return the tables at `positions`; None: at the first `length`."""
        if positions is None and length == len(self.cos):
            return self
        at = slice(length) if positions is None else positions
        return RotaryTables(self.cos[at], self.sin[at], self.interleaved)

    def pairs(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [.., r] -> the first and the second dims of all pairs, views of [.., r/2]."""
        if self.interleaved:
            return x[..., ::2], x[..., 1::2]
        first, second = x.chunk(2, dim=-1)
        return first, second


def rotate(x: torch.Tensor, tables: RotaryTables, back: bool, out: torch.Tensor) -> None:
    """Rotate x [b, s, heads, d] into `out`; tables [s, ..] or [b, s, ..]. `back`: by the negative angle."""
    rotated = tables.cos.shape[-1]
    if rotated < x.shape[-1]:
        out[..., rotated:] = x[..., rotated:]
        x, out = x[..., :rotated], out[..., :rotated]
    torch.mul(x, tables.cos, out=out)
    (a, b), (first, second) = tables.pairs(x), tables.pairs(out)
    sign = -1 if back else 1
    first.addcmul_(b, tables.sin, value=-sign)
    second.addcmul_(a, tables.sin, value=sign)
