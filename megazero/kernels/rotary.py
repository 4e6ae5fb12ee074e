"""Rotary positions: dims i and i + d/2 of a head are rotated by the angle position x base^(-2 i / d).

Shapes: b micro-batch, s sequence, d head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

# Llama 3.1's scaling: frequencies with fewer than LOW_FREQUENCY turns in TRAINED_LENGTH tokens are divided by the
# factor, those with more than HIGH_FREQUENCY turns stay.
LOW_FREQUENCY, HIGH_FREQUENCY, TRAINED_LENGTH = 1.0, 4.0, 8192


@dataclass(frozen=True)
class Rotary:
    """The angles of one model. They are fp32 in every precision, as in published checkpoints."""

    dim: int  # d
    base: float
    scaling: float = 1.0  # Llama 3.1's factor for contexts longer than TRAINED_LENGTH; 1: none

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
        """Return the tables of positions 0 to length - 1."""
        angles = torch.arange(length, device=device)[:, None, None].float() * self.frequencies(device)
        cos = angles.cos().to(dtype)
        return RotaryTables(torch.cat([cos, cos], dim=-1), angles.sin().to(dtype))


class RotaryTables(NamedTuple):
    """Cosines and sines of positions [..], in the precision of the tensors to rotate."""

    cos: torch.Tensor  # [.., 1, d], each cosine twice: for both dims that are rotated together
    sin: torch.Tensor  # [.., 1, d/2]

    def at(self, positions: torch.Tensor | None, length: int) -> RotaryTables:
        """Return the tables at `positions`; None: at the first `length`."""
        if positions is None and length == len(self.cos):
            return self
        at = slice(length) if positions is None else positions
        return RotaryTables(self.cos[at], self.sin[at])


def rotate(x: torch.Tensor, tables: RotaryTables, back: bool, out: torch.Tensor) -> None:
    """Rotate x [b, s, heads, d] into `out`; tables [s, ..] or [b, s, ..]. `back`: by the negative angle."""
    torch.mul(x, tables.cos, out=out)
    a, b = x.chunk(2, dim=-1)
    first, second = out.chunk(2, dim=-1)
    sign = -1 if back else 1
    first.addcmul_(b, tables.sin, value=-sign)
    second.addcmul_(a, tables.sin, value=sign)
