"""The part of each parameter that a rank owns: the master weights and moments that it updates and saves. Pure."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

from megazero.engine.plan.layout.flat_layout import FlatLayout, Range, overlap
from megazero.engine.plan.layout.layers import Declare, Layers, stage_units
from megazero.engine.plan.layout.parameters import LocalBlock, ParamSpec, unit_layout
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.plan.layout.zero_policy import ShardingGroup, group_of, owned_ranges, sharding_groups
from megazero.flags.config import Config
from megazero.planner.layouts import rank_places


class RankPart(NamedTuple):
    """The part of a parameter that a rank owns: the flat range [start, stop) of its local block."""

    spec: ParamSpec
    block: LocalBlock
    start: int
    stop: int


def rank_parts(config: Config, layout: Layout, rank: int, declare: Declare) -> Iterator[RankPart]:
    """Yield the part of every parameter that rank `rank` owns, possibly empty, unit by unit. `config` is resolved."""
    coord, sizes = layout.coord(rank), layout.sizes
    places = rank_places(layout, rank)
    for specs, flat, group, ranges in _units(declare(config.model, layout.tp), config, layout, coord.pp):
        owned = ranges[places[group.axis]]
        for spec in specs:
            block = spec.local(places, sizes)
            start, stop, _ = overlap(flat.windows[spec.name], block.numel, owned)
            yield RankPart(spec, block, start, stop)


@functools.lru_cache(maxsize=4)
def _units(
    layers: Layers, config: Config, layout: Layout, pp: int
) -> list[tuple[list[ParamSpec], FlatLayout, ShardingGroup, tuple[Range, ...]]]:
    """Return each unit of a pipeline stage: parameters, buffer, group, and each rank's range of the buffer."""
    groups, specs = sharding_groups(config, layout), stage_units(layers, layout, pp, config.training.freeze_parameters)
    flats = {unit: unit_layout(each, layout.sizes, groups[group_of(unit)].shards) for unit, each in specs.items()}
    ranges = owned_ranges(flats, groups)
    return [(specs[unit], flat, groups[group_of(unit)], ranges[unit]) for unit, flat in flats.items()]
