"""Rotary positions: two dims of a head are rotated together by the angle position x base^(-2 i / d), i = 0 .. d/2 - 1.

The first d dims of a head are rotated, and the others are copied. Together are dims i and i + d/2, or interleaved dims
2 i and 2 i + 1.

Shapes: b micro-batch, s sequence, d rotated dims of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megazero.engine.options.model_options import HIGH_FREQUENCY, LOW_FREQUENCY, SLOW, ModelOptions, RopeScaling


def yarn_growth(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's factor of queries and keys whose wavelengths are stretched by `factor`."""
    return 0.1 * mscale * math.log(factor) + 1


@dataclass(frozen=True)
class Rotary:
    """The angles of a layer. They are fp32 in every precision, as in published checkpoints."""

    dim: int  # d; 0: no rotation
    base: float
    scaling: float = 1.0  # factor by which wavelengths are stretched; 1: none
    scaling_type: RopeScaling = "llama3"
    trained_length: int = 8192
    interleaved: bool = False
    mscale: float = 0.0  # YaRN's; see `ModelOptions`
    mscale_all_dim: float = 0.0
    fast: float = 32.0  # YaRN's; see SLOW
    rounds: bool = True  # YaRN's: the first and last dims that are divided in part are whole numbers

    @classmethod
    def of(cls, model: ModelOptions, number: int) -> Rotary:
        """Return those of a layer, by its number."""
        kind = model.attention_kind(number)
        dim, interleaved = model.rotary_dim, model.rotary_interleaved
        if kind == "N":
            return cls(0, model.rotary_base)
        if kind == "L" and model.local_rotary_base:
            return cls(dim, model.local_rotary_base, interleaved=interleaved)
        scaling = model.rope_scaling_factor, model.rope_scaling_type, model.rope_trained_length
        growth = model.mscale, model.mscale_all_dim
        rounds = model.yarn_correction_range_round_to_int
        return cls(dim, model.rotary_base, *scaling, interleaved, *growth, fast=model.beta_fast, rounds=rounds)

    @property
    def amplitude(self) -> float:
        """YaRN's factor of cosines and sines, by which attention scores grow with the context."""
        if self.scaling_type != "yarn":
            return 1.0
        if self.mscale and self.mscale_all_dim:
            return yarn_growth(self.scaling, self.mscale) / yarn_growth(self.scaling, self.mscale_all_dim)
        return yarn_growth(self.scaling)

    def frequencies(self, device: torch.device) -> torch.Tensor:
        """Radians per position, [d/2]."""
        exponents = torch.arange(0, self.dim, 2, dtype=torch.int64, device=device).float() / self.dim
        found = 1.0 / self.base**exponents
        if self.scaling == 1.0:
            return found
        kept = self._kept(found)
        return (1 - kept) * found / self.scaling + kept * found

    def _kept(self, frequencies: torch.Tensor) -> torch.Tensor:
        """Return the share of each frequency that is not scaled, [d/2]."""
        if self.scaling_type == "linear":
            return torch.zeros_like(frequencies)
        if self.scaling_type == "llama3":
            turns = self.trained_length / (2 * math.pi / frequencies)
            return ((turns - LOW_FREQUENCY) / (HIGH_FREQUENCY - LOW_FREQUENCY)).clamp(0, 1)
        first, last = self._dim_of(self.fast), self._dim_of(SLOW)
        if self.rounds:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, self.dim - 1)
        dims = torch.arange(self.dim // 2, dtype=torch.float32, device=frequencies.device)
        return 1 - ((dims - first) / max(last - first, 0.001)).clamp(0, 1)

    def _dim_of(self, turns: float) -> float:
        """Return the number i of the frequency that makes `turns` turns in the trained length."""
        return self.dim * math.log(self.trained_length / (turns * 2 * math.pi)) / (2 * math.log(self.base))

    def tables(self, length: int, dtype: torch.dtype, device: torch.device) -> RotaryTables:
        """Return the tables of positions 0 to length - 1."""
        if device.type == "meta":  # computed, they would have torch import its compiler: 3 CPU seconds and 150 MB
            cos, sin = (torch.empty(length, 1, d, dtype=dtype, device=device) for d in (self.dim, self.dim // 2))
            return RotaryTables(cos, sin, self.interleaved)
        angles = torch.arange(length, device=device)[:, None, None].float() * self.frequencies(device)
        cos, sin = angles.cos().mul_(self.amplitude).to(dtype), angles.sin().mul_(self.amplitude).to(dtype)
        twice = cos.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat([cos, cos], dim=-1)
        return RotaryTables(twice, sin, self.interleaved)


class RotaryTables(NamedTuple):
    """Cosines and sines of positions [..], in the precision of the tensors to rotate."""

    cos: torch.Tensor  # [.., 1, d], each cosine twice: for both dims that are rotated together
    sin: torch.Tensor  # [.., 1, d/2]
    interleaved: bool

    def at(self, positions: torch.Tensor | None, length: int) -> RotaryTables:
        """Return the tables at `positions`; None: at the first `length`."""
        if positions is None and length == len(self.cos):
            return self
        at = slice(length) if positions is None else positions
        return RotaryTables(self.cos[at], self.sin[at], self.interleaved)

    def parts(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of x [.., d]: the first and the second of the dims that are rotated together."""
        if self.interleaved:
            return x[..., ::2], x[..., 1::2]
        first, second = x.chunk(2, dim=-1)
        return first, second


def rotate(x: torch.Tensor, tables: RotaryTables, back: bool, out: torch.Tensor) -> None:
    """Rotate x [b, s, heads, d ..] into `out`; tables [s, ..] or [b, s, ..]. `back`: by the negative angle."""
    d = tables.cos.shape[-1]
    if d < x.shape[-1]:
        out[..., d:].copy_(x[..., d:])
        x, out = x[..., :d], out[..., :d]
    torch.mul(x, tables.cos, out=out)
    a, b = tables.parts(x)
    first, second = tables.parts(out)
    sign = -1 if back else 1
    first.addcmul_(b, tables.sin, value=-sign)
    second.addcmul_(a, tables.sin, value=sign)
