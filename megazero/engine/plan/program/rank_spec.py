"""`RankSpec`: layers, units and policies of a pipeline rank, the input of the passes of `engine.plan.program`. Pure."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

from megazero.engine.options.schema import StepConfig
from megazero.engine.plan.layout.flat_layout import FlatLayout, Range
from megazero.engine.plan.layout.layers import Declare, Use, pass_costs, stage_units
from megazero.engine.plan.layout.parameters import EXPERTS, unit_layout
from megazero.engine.plan.layout.topology import Layout, Route, route
from megazero.engine.plan.layout.zero_policy import (
    DENSE,
    ShardingGroup,
    ZeroPolicy,
    group_of,
    host_units,
    owned_ranges,
    sharding_groups,
)
from megazero.engine.plan.program.operations import Transfer
from megazero.engine.plan.schedule.schedules import Pipeline, placement


class PlannedLayer(NamedTuple):
    """The properties of a layer that the passes read."""

    name: str
    units: tuple[str, ...]
    use: Use
    trains: bool  # at least one parameter
    passes_gradient: bool  # its input needs a gradient
    kind: str  # the name of the first layer of its kind

    @property
    def has_backward(self) -> bool:
        return self.trains or self.passes_gradient

    @property
    def queues_weights(self) -> bool:
        """True if its weight gradients can wait: a block's.

        The head's queue would keep the logits, and no rank waits for the embeddings' gradients.
        """
        return self.trains and self.use is Use.LAYER


class Unit(NamedTuple):
    """The properties of a unit that the passes read."""

    flat: FlatLayout  # with the names of the first unit of its kind
    trains: bool
    owned: tuple[Range, ...] = ()  # by each rank of its sharding group
    sums_over_tp: bool = False  # at least one gradient
    summed: tuple[Range, ...] = ()  # elements whose gradients are summed over tp
    group: str = DENSE  # its sharding group
    on_host: bool = False  # master weights, states and reduced gradients are in host memory

    @property
    def numel(self) -> int:
        return self.flat.numel


@dataclass(frozen=True)
class RankSpec:
    """The properties of a rank that the passes read. They depend on its pipeline position alone.

    So all ranks along other axes have the same program, and issue their collectives in the same order.
    """

    chunks: tuple[tuple[PlannedLayer, ...], ...]
    units: dict[str, Unit]
    groups: dict[str, ShardingGroup]
    pipeline: Pipeline  # its place in it
    overlap: bool = True
    recompute: bool = False  # blocks are recomputed
    partitioned: bool = False  # kept inputs are partitioned over tp
    on_host: bool = False  # kept inputs are in host memory
    on_disk: bool = False  # units on the host have their states in a file
    arena: bool = False  # kept inputs are in an arena
    tied: str | None = None  # the unit of the embedding group

    @functools.cached_property
    def placement(self) -> tuple[int, ...]:
        return placement(self.pipeline.ranks, len(self.chunks), self.pipeline.v_shaped)

    @functools.cached_property
    def stages(self) -> list[int]:
        """This rank's virtual stages, chunk by chunk."""
        return [stage for stage, holder in enumerate(self.placement) if holder == self.pipeline.rank]

    def is_remote(self, stage: int) -> bool:
        """Return whether virtual stage `stage` exists and is on another rank."""
        return 0 <= stage < len(self.placement) and self.placement[stage] != self.pipeline.rank

    def route(self, op: Transfer) -> Route:
        return route(self.placement, op.what, op.to)

    @functools.cached_property
    def layers(self) -> dict[str, PlannedLayer]:
        return {layer.name: layer for chunk in self.chunks for layer in chunk}

    def group(self, unit: str) -> ShardingGroup:
        return self.groups[self.units[unit].group]

    def policy(self, unit: str) -> ZeroPolicy:
        return self.group(unit).policy

    @property
    def trained_units(self) -> list[str]:
        return [name for name, unit in self.units.items() if unit.trains]

    def reduces_each(self, unit: str) -> bool:
        """Return True if the gradients of every micro-batch are reduced, and added up in their owned range."""
        return self.policy(unit).reduces_each(self.units[unit].on_host)

    @property
    def offloaded_units(self) -> list[str]:
        """Units whose gradients are copied to host memory and updated there."""
        return [name for name in self.trained_units if self.units[name].on_host]

    def recomputes(self, layer: PlannedLayer) -> bool:
        return self.recompute and layer.use is Use.LAYER and layer.has_backward


def rank_spec(config: StepConfig, layout: Layout, pp: int, declare: Declare) -> RankSpec:
    """Describe the ranks at pipeline position `pp`; `config` is resolved."""
    layers = declare(config.model, layout.tp)
    specs = stage_units(layers, layout, pp, config.training.freeze_parameters)
    groups = sharding_groups(config, layout)
    known: dict[tuple[str, str, tuple[bool, ...]], FlatLayout] = {}  # units of a kind differ only in their name
    flats: dict[str, FlatLayout] = {}
    for name, params in specs.items():
        key = layers.kinds[name.removesuffix(EXPERTS)].name, group_of(name), tuple(spec.trains for spec in params)
        known[key] = flats[name] = known.get(key) or unit_layout(params, layout.sizes, groups[group_of(name)].shards)
    ranges = owned_ranges(flats, groups)
    tied = layers.tied if layout.last_pp > 0 and pp in (0, layout.last_pp) else None
    on_host = host_units(config, {name: flat.numel for name, flat in flats.items()}, tied)
    units: dict[str, Unit] = {}
    for name, params in specs.items():
        group, sequence_parallel = groups[group_of(name)], config.parallel.sequence_parallel
        summed = tuple(group.summed(flats[name], sequence_parallel))
        sums, trains = bool(summed) or (sequence_parallel and group.over_tp), any(spec.trains for spec in params)
        units[name] = Unit(
            flat=flats[name],
            trains=trains,
            owned=ranges[name],
            sums_over_tp=sums,
            summed=summed,
            group=group_of(name),
            on_host=name in on_host,
        )
    chunks: list[tuple[PlannedLayer, ...]] = []
    for chunk, stage in enumerate(layout.stages(pp)):
        found: list[PlannedLayer] = []
        passes = stage > 0
        for name in layers.chunk(layout, pp, chunk):
            kind = layers.kinds[name]
            names = (*(name + end for end in kind.suffixes), *kind.reads)
            trains = any(units[n].trains for n in names)
            found.append(
                PlannedLayer(
                    name=name, units=names, use=kind.use, trains=trains, passes_gradient=passes, kind=kind.name
                )
            )
            passes = passes or trains
        chunks.append(tuple(found))
    activations = config.activations
    return RankSpec(
        chunks=tuple(chunks),
        units=units,
        groups=groups,
        pipeline=Pipeline(
            rank=pp,
            ranks=layout.pp,
            chunks=layout.chunks,
            backlog=config.parallel.zero_bubble_backlog or None,
            v_shaped=layout.v_shaped,
            costs=pass_costs(layers, activations),
        ),
        overlap=config.zero.overlap_comm,
        recompute=activations.recompute == "full",
        partitioned=activations.partition_activations,
        on_host=activations.checkpoint_in_cpu,
        on_disk=bool(config.optimizer.optimizer_nvme_offload),
        arena=activations.contiguous_checkpointing,
        tied=tied,
    )
