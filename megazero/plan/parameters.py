"""Parameters of the model as plain values: global name, global shape, sharded dim, decay, initial values, unit. Pure.

The layers declare them (`model.weight`); the initial weights, the checkpoints and `estimate` read them here.

A *unit* is what is gathered, reduced and updated together: a block, the token table, the position table, the head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from megazero.plan.flat_layout import FlatLayout, FlatParam, flat_layout, round_up

VOCABULARY_ALIGN = 64  # rows of a rank's part of the token table: keeps the logits' matrix product aligned


@dataclass(frozen=True)
class LocalBlock:
    """The part of a parameter that one tensor-parallel rank holds."""

    offset: tuple[int, ...]  # in the global tensor
    shape: tuple[int, ...]  # its true part: what is initialised, saved and loaded
    stored: tuple[int, ...]  # in memory: with the vocabulary's padding rows behind the true ones

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stored_numel(self) -> int:
        return math.prod(self.stored)


class GradientGroup(Enum):
    """Axes over which a parameter's gradient is a sum."""

    DP = "dp"
    DP_TP = "dp x tp"  # replicated over tp, and each rank computes with a part of it


@dataclass(frozen=True)
class ParamSpec:
    """A parameter of the global model."""

    name: str  # "blocks.3.mlp.up.weight"
    shape: tuple[int, ...]  # of the global tensor, padding excluded
    tp_dim: int | None  # the dim that is sharded over tp; None: replicated
    decays: bool
    std: float = 0.0  # of the initial normal distribution
    mean: float = 0.0
    pads: bool = False  # rows are padded: the vocabulary
    group: GradientGroup = GradientGroup.DP
    trains: bool = True  # False: frozen; it has no gradient and does not decay

    def local(self, tp_size: int, tp_rank: int) -> LocalBlock:
        """The block of rank `tp_rank` of `tp_size`. Without padding, the sizes divide: `config` has seen to it."""
        offset, shape = [0] * len(self.shape), list(self.shape)
        if self.tp_dim is None:
            return LocalBlock(tuple(offset), self.shape, self.shape)
        whole = self.shape[self.tp_dim]
        each = -(-whole // tp_size)
        if self.pads:
            each = round_up(each, VOCABULARY_ALIGN)
        assert self.pads or each * tp_size == whole, (self.name, self.shape, tp_size)
        start = min(whole, tp_rank * each)
        offset[self.tp_dim], shape[self.tp_dim] = start, min(whole, start + each) - start
        stored = list(self.shape)
        stored[self.tp_dim] = each
        return LocalBlock(tuple(offset), tuple(shape), tuple(stored))


def unit_layout(specs: list[ParamSpec], tp_size: int, shards: int) -> FlatLayout:
    """The flat buffer of a unit, laid out for `shards` data-parallel ranks. The same on every tensor-parallel rank."""
    return flat_layout(
        [
            FlatParam(
                s.name, s.local(tp_size, 0).stored_numel, s.decays, s.tp_dim is not None, s.group is GradientGroup.DP_TP
            )
            for s in specs
        ],
        shards,
    )
