"""Rotary positions: dims i and i + d/2 of a head are rotated by the angle position x base^(-2 i / d)."""

from __future__ import annotations

import math
from dataclasses import dataclass

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

    def tables(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin, [.., s, 1, d/2] in x's dtype, for x [b, s, heads, d] at `positions` [s] or [b, s].

        None: positions 0 to s - 1.
        """
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        angles = positions[..., None, None].float() * self.frequencies(x.device)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Rotate x [b, s, heads, d] into `out`, or into a new contiguous tensor; with -sin, back."""
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    a, b = x.chunk(2, dim=-1)
    first, second = out.chunk(2, dim=-1)
    torch.mul(a, cos, out=first).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=second).addcmul_(a, sin)
    return out
