"""ZeRO policies: the sharded states and persistent buffers of a run, read by the engine and the estimate. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from megazero.engine.options.schema import StepConfig, ZeroConfig
from megazero.engine.plan.layout.flat_layout import ALIGN, FlatLayout, Range, deal_matrices, equal_ranges, round_up
from megazero.engine.plan.layout.parameters import EXPERTS
from megazero.engine.plan.layout.topology import Layout


@dataclass(frozen=True)
class ZeroPolicy:
    """The states that are sharded over the ranks of a sharding group."""

    optimizer: bool
    gradients: bool  # reduced after every micro-batch: whole gradients do not outlive a unit's backward
    parameters: bool
    gathers_once: bool = False  # once per iteration, not at every use: FSDP2's reshard_after_forward=False
    # Units whose states are in host memory or a file add up each micro-batch's gradients there, also on one rank
    sums_at_home: bool = False

    @property
    def syncs(self) -> bool:
        """True if every rank keeps whole weights and updates a part of them."""
        return self.optimizer and not self.parameters

    def reduces_each(self, on_host: bool) -> bool:
        """Return whether a unit's gradients are reduced after every micro-batch. on_host: its states are not here."""
        return self.gradients or (self.sums_at_home and on_host)

    @classmethod
    def for_stage(cls, config: ZeroConfig, size: int, offloads: bool = False) -> Self:
        """Return the policy of --zero-stage over `size` ranks. With one rank, every stage is stage 0.

        Args:
            offloads: some units have their states in host memory or a file.
        """
        stage, every = config.zero_stage if size > 1 else 0, config.zero_reduce_every == "micro-batch"
        return cls(
            optimizer=stage >= 1,
            gradients=stage >= 2 and every,
            parameters=stage >= 3,
            gathers_once=stage >= 3 and config.zero_gather_every == "step",
            sums_at_home=offloads and config.zero_stage >= 2 and every,
        )


@dataclass(frozen=True)
class ShardingGroup:
    """Ranks that share one copy of some units, and the ZeRO policy of these units.

    Attributes:
        axis, shards: the axis of the ranks that share a copy, and its size.
        replica_axis, replicas: the axis of the ranks that own the same range of different copies, and its size.
        whole: each matrix has one owner.
        over_tp: whether tensor-parallel ranks hold parts or copies of the units: of all but experts.
    """

    policy: ZeroPolicy
    axis: str
    shards: int
    replica_axis: str
    replicas: int
    whole: bool = False
    over_tp: bool = True

    @classmethod
    def of(cls, config: StepConfig, layout: Layout, axis: str, replica_axis: str, over_tp: bool = True) -> Self:
        """Return the group along `axis`. With one rank, its policy is stage 0."""
        shards, whole = layout.sizes[axis], config.optimizer.rules.matrices.whole_matrices
        return cls(
            policy=ZeroPolicy.for_stage(config.zero, shards, offload_fraction(config) > 0),
            axis=axis,
            shards=shards,
            replica_axis=replica_axis,
            replicas=layout.sizes[replica_axis],
            whole=whole,
            over_tp=over_tp,
        )

    @property
    def parts(self) -> int:
        """Number of parts that a unit is divided into, one per owning rank."""
        return self.shards if self.policy.optimizer else 1

    def owned(self, flats: Mapping[str, FlatLayout]) -> dict[str, tuple[Range, ...]]:
        """Return the range of each unit that each rank of the group owns, which it updates and saves.

        Args:
            flats: unit -> its buffer, of all of a pipeline rank's units in the group.
        """
        if not self.policy.optimizer:
            return {name: (Range(0, flat.numel),) * self.shards for name, flat in flats.items()}
        dealt = deal_matrices(
            {name: flat for name, flat in flats.items() if flat.has_matrices and self.whole}, self.shards
        )
        return {name: dealt.get(name) or equal_ranges(flat.numel, self.shards) for name, flat in flats.items()}

    def summed(self, flat: FlatLayout, sequence_parallel: bool) -> list[Range]:
        """Return the ranges of a unit whose gradient is a sum over tp."""
        return flat.summed("tp", sequence_parallel) if self.over_tp else []

    @property
    def norm_axis(self) -> str:
        """The axis over which its ranks' squares of gradients are summed, after tp and pp; empty: none."""
        if self.over_tp:
            return self.axis if self.policy.optimizer else ""
        return "data"


DENSE, EXPERT = "dense", "expert"


def sharding_groups(config: StepConfig, layout: Layout) -> dict[str, ShardingGroup]:
    """Return name -> sharding group of a run; equal and in the same order on every rank."""
    found = {DENSE: ShardingGroup.of(config, layout, "shard", "replica")}
    if config.model.num_experts:
        found[EXPERT] = ShardingGroup.of(config, layout, "expert_shard", "expert_replica", over_tp=False)
    return found


def owned_ranges(flats: Mapping[str, FlatLayout], groups: Mapping[str, ShardingGroup]) -> dict[str, tuple[Range, ...]]:
    """Return unit -> the range that each rank of its group owns, of all units of a pipeline rank."""
    found: dict[str, tuple[Range, ...]] = {}
    for name, group in groups.items():
        found |= group.owned({unit: flat for unit, flat in flats.items() if group_of(unit) == name})
    return found


def group_of(unit: str) -> str:
    """Return the name of a unit's sharding group."""
    return EXPERT if unit.endswith(EXPERTS) else DENSE


class PersistentGradients(NamedTuple):
    """Gradient buffers that are slices of one persistent arena."""

    unsharded: bool
    sharded: bool


def host_units(config: StepConfig, numel: Mapping[str, int], tied: str | None) -> frozenset[str]:
    """Return the units of a pipeline rank whose master weights, states and reduced gradients are in host memory.

    They are its first units, with at most --optimizer-offload-fraction of its elements. The table that two stages hold
    comes last, because both must update it in the same place: CPUs and GPUs round differently.

    Args:
        numel: unit -> its elements.
        tied: the unit that two stages hold.
    """
    if not offload_fraction(config):
        return frozenset()
    most, at, found = offload_fraction(config) * sum(numel.values()), 0, set[str]()
    for name in sorted(numel, key=lambda name: name == tied):
        at += numel[name]
        if at > most:
            break
        found.add(name)
    return frozenset(found)


def offload_fraction(config: StepConfig) -> float:
    """Return the largest share of a rank's elements with states in host memory; 0: all states are on the device."""
    offloads = config.optimizer.optimizer_cpu_offload and config.trains
    return config.optimizer.optimizer_offload_fraction if offloads else 0.0


def persistent_gradients(policy: ZeroPolicy, arena: bool, micro_batches: int, on_host: bool) -> PersistentGradients:
    """Choose which gradient buffers are persistent under --contiguous-checkpointing (`arena`).

    They are the buffers that outlive a unit's backward: sharded ones, unless they are in host memory (`on_host`), and
    unsharded ones that accumulate.
    """
    each = policy.reduces_each(on_host)
    accumulates = not each and (micro_batches > 1 or not policy.optimizer)
    return PersistentGradients(unsharded=arena and accumulates, sharded=arena and policy.optimizer and not on_host)


class Buckets(NamedTuple):
    """Shape and number of the reduce-scatter buckets. Each has a row for every rank, of `columns` elements on average.

    Rows are as long as each other, unless ranks own whole matrices: then the rows of a unit are in proportion to the
    ranges of the ranks, and each begins at a multiple of ALIGN.
    """

    columns: int
    slots: int  # buckets in flight at once
    packs: bool  # some unit is larger than a bucket, so that its rows are copied into buckets
    row: int  # the longest row that this rank receives
    packed: int  # elements of a bucket, if units are packed, else 0

    def count(self, ranges: Sequence[Range]) -> int:
        """Return the number of buckets of a unit; ranges: of it, that ranks own."""
        return max(1, -(-_mean(ranges) // self.columns)) if self.columns else 1

    def rows(self, ranges: Sequence[Range], number: int) -> list[Range]:
        """Return the part of each rank's range that bucket `number` of a unit has."""
        if self.count(ranges) == 1:
            return list(ranges)
        mean, found = _mean(ranges), []
        for owned in ranges:
            each = round_up(-(-owned.numel * self.columns // mean), ALIGN)
            found.append(Range(*(min(owned.stop, owned.start + k * each) for k in (number, number + 1))))
        return found


def _mean(ranges: Sequence[Range]) -> int:
    return sum(owned.numel for owned in ranges) // len(ranges)


def plan_buckets(bucket_size: int, units: Sequence[Sequence[Range]], place: int, overlap: bool) -> Buckets:
    """Plan buckets of about `bucket_size` elements (at least ALIGN columns).

    A unit's reduction ends before the next one's starts. So a second bucket helps only units that need several, and no
    bucket is larger than the largest unit.

    Args:
        units: of each unit, the range that each rank of its group owns.
        place: this rank's.
    """
    if not units:
        return Buckets(columns=0, slots=1, packs=False, row=0, packed=0)
    largest, shards = max(map(_mean, units)), len(units[0])
    columns = min(largest, max(ALIGN, bucket_size // shards // ALIGN * ALIGN))
    found = Buckets(
        columns=columns, slots=2 if overlap and largest > columns else 1, packs=largest > columns, row=0, packed=0
    )
    rows = [found.rows(ranges, 0) for ranges in units]  # the longest are first
    packed = max(sum(row.numel for row in each) for each in rows) if found.packs else 0
    return found._replace(row=max(each[place].numel for each in rows), packed=packed)
