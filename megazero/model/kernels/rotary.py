"""Rotary positions: dims i and i + d/2 of a head are rotated by the angle position x base^(-2 i / d)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

# Llama 3.1's: frequencies of wavelengths beyond the first are divided by the factor, those below the second kept.
LOW_FREQUENCY, HIGH_FREQUENCY, TRAINED_LENGTH = 1.0, 4.0, 8192


@dataclass(frozen=True)
class Rotary:
    """The angles of one model. They are fp32 whatever the precision, as those of published checkpoints are.

    Attributes:
        dim: d.
        scaling: llama 3.1's factor for contexts longer than those trained with; 1: none.
    """

    dim: int
    base: float
    scaling: float = 1.0

    def frequencies(self, device: torch.device) -> torch.Tensor:
        """Radians per position, [d/2]."""
        exponents = torch.arange(0, self.dim, 2, dtype=torch.int64, device=device).float() / self.dim
        found = 1.0 / self.base**exponents
        if self.scaling == 1.0:
            return found
        lengths = 2 * math.pi / found
        smooth = (TRAINED_LENGTH / lengths - LOW_FREQUENCY) / (HIGH_FREQUENCY - LOW_FREQUENCY)
        between = (1 - smooth) * found / self.scaling + smooth * found
        scaled = torch.where(lengths > TRAINED_LENGTH / LOW_FREQUENCY, found / self.scaling, found)
        middle = (lengths <= TRAINED_LENGTH / LOW_FREQUENCY) & (lengths >= TRAINED_LENGTH / HIGH_FREQUENCY)
        return torch.where(middle, between, scaled)

    def tables(self, length: int, dtype: torch.dtype, device: torch.device) -> RotaryTables:
        """Make the tables of positions 0 to length - 1."""
        angles = torch.arange(length, device=device)[:, None, None].float() * self.frequencies(device)
        cos = angles.cos().to(dtype)
        return RotaryTables(torch.cat([cos, cos], dim=-1), angles.sin().to(dtype))


class RotaryTables(NamedTuple):
    """Cosines and sines of positions [..], in the precision of what is rotated."""

    cos: torch.Tensor  # [.., 1, d], a cosine for each of the two dims that are rotated together
    sin: torch.Tensor  # [.., 1, d/2]

    def at(self, positions: torch.Tensor | None, length: int) -> RotaryTables:
        """Return the tables at `positions`; None: at the first `length`."""
        if positions is None and length == len(self.cos):
            return self
        at = slice(length) if positions is None else positions
        return RotaryTables(self.cos[at], self.sin[at])


def rotate(x: torch.Tensor, tables: RotaryTables, back: bool = False, out: torch.Tensor | None = None) -> torch.Tensor:
    """Rotate x [b, s, heads, d] into `out`, or into a new contiguous tensor; tables [s, ..] or [b, s, ..]."""
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    torch.mul(x, tables.cos, out=out)
    a, b = x.chunk(2, dim=-1)
    first, second = out.chunk(2, dim=-1)
    sign = -1 if back else 1
    first.addcmul_(b, tables.sin, value=-sign)
    second.addcmul_(a, tables.sin, value=sign)
    return out
