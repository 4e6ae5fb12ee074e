"""ZeRO policy: what is sharded, which buffers are persistent. Plain values. Pure.

The engine and `price.estimate` read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megazero.config.schema import Config, ZeroConfig
from megazero.plan.flat_layout import ALIGN, Cut, FlatLayout, Range, equal_ranges, whole_windows
from megazero.plan.topology import Layout


@dataclass(frozen=True)
class ZeroPolicy:
    """States that are sharded over the ranks that share a copy."""

    optimizer: bool
    gradients: bool  # reduced at every micro-batch: unsharded ones never outlive a unit's backward
    parameters: bool
    gathers_once: bool = False  # gathered once per iteration, not at every use (reshard_after_forward=False of FSDP2)

    @property
    def syncs(self) -> bool:
        """True if every rank keeps whole weights but updates a part of them."""
        return self.optimizer and not self.parameters

    @classmethod
    def for_stage(cls, config: ZeroConfig, size: int) -> ZeroPolicy:
        """Make the policy of --zero-stage over `size` ranks. One rank has nothing to shard: every stage is stage 0."""
        stage = config.zero_stage if size > 1 else 0
        return cls(
            optimizer=stage >= 1,
            gradients=stage >= 2 and config.zero_reduce_every == "micro-batch",
            parameters=stage >= 3,
            gathers_once=stage >= 3 and config.zero_gather_every == "step",
        )


@dataclass(frozen=True)
class ShardingGroup:
    """Ranks that share one copy of some units, and what is sharded over them.

    Attributes:
        axis, shards: of the ranks that share a copy, and their number.
        replica_axis, replicas: of the ranks that own the same range, each of another copy.
        cut: the ranges that the ranks own, where a unit is sharded.
    """

    policy: ZeroPolicy
    axis: str
    shards: int
    replica_axis: str
    replicas: int
    cut: Cut = equal_ranges

    @classmethod
    def of(cls, config: Config, layout: Layout, axis: str, replica_axis: str) -> ShardingGroup:
        """Make the group along `axis`; of one rank, it is that of stage 0."""
        shards, whole = layout.sizes[axis], config.optimizer.rule.whole_matrices
        return cls(
            ZeroPolicy.for_stage(config.zero, shards),
            axis,
            shards,
            replica_axis,
            layout.sizes[replica_axis],
            whole_windows if whole else equal_ranges,
        )

    @property
    def parts(self) -> int:
        """Parts of a unit, each of which one rank of the group owns."""
        return self.shards if self.policy.optimizer else 1

    def owned(self, flat: FlatLayout, place: int) -> Range:
        """Return the range that the group's rank `place` owns: updates and saves."""
        return self.cut(flat, place, self.shards) if self.policy.optimizer else Range(0, flat.numel)


DENSE = "dense"


def sharding_groups(config: Config, layout: Layout) -> dict[str, ShardingGroup]:
    """Name -> sharding group of a run; the same on every rank, in the same order."""
    return {DENSE: ShardingGroup.of(config, layout, "shard", "replica")}


def group_of(unit: str) -> str:
    """Return the name of a unit's sharding group."""
    return DENSE


class PersistentGradients(NamedTuple):
    """Gradient buffers that are slices of one persistent arena: see `persistent_gradients`."""

    unsharded: bool
    sharded: bool


def persistent_gradients(policy: ZeroPolicy, arena: bool, micro_batches: int) -> PersistentGradients:
    """Choose which gradient buffers are persistent under --contiguous-checkpointing (`arena`).

    Those that outlive their unit's backward: the sharded ones, and unsharded ones that accumulate over micro-batches.
    """
    accumulates = not policy.optimizer or (not policy.gradients and micro_batches > 1)
    return PersistentGradients(unsharded=arena and accumulates, sharded=arena and policy.optimizer)


class Buckets(NamedTuple):
    """Shape and number of the reduce-scatter buckets, of [shards, columns] elements each."""

    columns: int  # elements of every rank's range
    slots: int  # buckets in flight at once
    packs: bool  # some unit is larger than a bucket: its buckets are copied together


def plan_buckets(bucket_size: int, sizes: list[int], shards: int, overlap: bool) -> Buckets:
    """Plan buckets of at most `bucket_size` elements, or of ALIGN columns where that is more, for units of `sizes`.

    A unit's reduction is waited for before the next one's begins. So a second bucket is of use only where a unit needs
    several; and it is no larger than the largest unit.
    """
    largest = max(sizes, default=0) // shards
    columns = min(largest, max(ALIGN, bucket_size // shards // ALIGN * ALIGN))
    packs = largest > columns
    return Buckets(columns, 2 if overlap and packs else 1, packs)
