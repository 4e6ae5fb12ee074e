"""The part of each parameter that a rank owns: the master weights and moments that it updates and saves. Pure."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

from megazero.config.schema import Config
from megazero.plan.flat_layout import FlatLayout, Range
from megazero.plan.layers import Declare, Layers, stage_units
from megazero.plan.parameters import LocalBlock, ParamSpec, unit_layout
from megazero.plan.topology import Layout
from megazero.plan.zero_policy import ZeroPolicy


class Overlap(NamedTuple):
    """The part of a parameter within a range of its unit's flat buffer."""

    start: int  # in the parameter's local block, flat
    stop: int
    within: Range  # the same part, counted from the start of the range


def overlap(window: Range, block: LocalBlock, owned: Range) -> Overlap:
    """Return the part of a parameter in `owned`, possibly empty. Padding, the end of its window, is left out."""
    true = Range(window.start, window.start + block.numel)
    mine = true.within(owned)
    first = mine.start + owned.start - true.start if mine.numel else 0
    return Overlap(first, first + mine.numel, mine)


class RankPart(NamedTuple):
    """The part of a parameter that a rank owns: the flat range [start, stop) of its local block."""

    spec: ParamSpec
    block: LocalBlock
    start: int
    stop: int


def rank_parts(config: Config, layout: Layout, rank: int, declare: Declare) -> Iterator[RankPart]:
    """Yield the parts that a rank of a layout owns, unit by unit, empty ones too. `config` is resolved."""
    coord, shards = layout.coord(rank), layout.shard
    ranks = coord._asdict()
    policy = ZeroPolicy.for_stage(config.zero, shards)
    for specs, flat in _units(declare(config.model, layout.tp), layout, coord.pp, config.training.freeze_parameters):
        owned = flat.owned(layout.shard_rank(coord), shards) if policy.optimizer else Range(0, flat.numel)
        for spec in specs:
            block = spec.local(ranks, layout.sizes)
            part = overlap(flat.windows[spec.name], block, owned)
            yield RankPart(spec, block, part.start, part.stop)


@functools.lru_cache(maxsize=4)
def _units(
    layers: Layers, layout: Layout, pp: int, frozen: tuple[str, ...]
) -> tuple[tuple[list[ParamSpec], FlatLayout], ...]:
    """Return each unit of a pipeline stage: its parameters and their flat buffer, the same on all of its ranks."""
    units = stage_units(layers, layout, pp, frozen).values()
    return tuple((specs, unit_layout(specs, layout.sizes, layout.shard)) for specs in units)
