"""ZeRO policy: what is sharded, which buffers are persistent. Plain values. Pure.

The engine and `price.estimate` read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megazero.config.schema import ZeroConfig
from megazero.plan.flat_layout import ALIGN


@dataclass(frozen=True)
class ZeroPolicy:
    """States that are sharded over the shard axis."""

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


class PersistentGradients(NamedTuple):
    """Gradient buffers that are slices of one persistent arena: see `persistent_gradients`."""

    unsharded: bool
    sharded: bool


NOTHING_PERSISTENT = PersistentGradients(False, False)


def persistent_gradients(policy: ZeroPolicy, arena: bool, micro_batches: int) -> PersistentGradients:
    """Choose which gradient buffers are persistent under --contiguous-checkpointing (`arena`).

    Those that outlive their unit's backward: the sharded ones, and unsharded ones that accumulate over micro-batches.
    """
    accumulates = not policy.optimizer or (not policy.gradients and micro_batches > 1)
    return PersistentGradients(unsharded=arena and accumulates, sharded=arena and policy.optimizer)


COPY_DEPTH = 2  # device buffers each way between a GPU and host memory: one in use, one in flight


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
