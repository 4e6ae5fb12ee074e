"""Plans of a save in a simulated world: those of every rank, and that of rank 0."""

import time
from collections.abc import Mapping
from math import prod
from typing import NamedTuple

import torch

from megazero.checkpoint.planning import RankPlan, SaveLayout, own_chunks
from megazero.checkpoint.shards import LocalShard
from megazero.checkpoint.shared_outcome import message_of, value_of_message
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.flat_layout import Range
from megazero.engine.plan.layout.topology import Layout
from megazero.flags.config import Config
from megazero.planner.bytes.rank_parts import rank_parts
from megazero.planner.state_shares import saved_states


class PlannedSave(NamedTuple):
    """Size of one rank's part of a save, and of the whole, with the time that planning them takes."""

    rank_seconds: float  # planning of this rank
    rank_plan_bytes: int  # sent to rank 0
    coordinator_seconds: float  # rank 0 reads the plans of all ranks, and proves that they cover every tensor
    written_bytes: int  # of tensors, by this rank
    written_chunks: int
    checkpoint_bytes: int  # of tensors, by all ranks


def pretended_shards(config: Config, layout: Layout, rank: int, dtype: torch.dtype) -> dict[str, LocalShard]:
    """Return the shards that a rank saves, on stand-in tensors. `config` is resolved."""
    found: dict[str, LocalShard] = {}
    rules = config.optimizer.rules
    for part in rank_parts(config, layout, rank, declare):
        data = torch.empty(part.stop - part.start, device="meta", dtype=dtype)
        shard = LocalShard.of(part.spec, part.block, Range(part.start, part.stop), data)
        found |= {f"{prefix}.{part.spec.name}": shard for prefix in saved_states(rules, part.spec.kind)}
    return found


def plan_save(config: Config, layout: Layout, rank: int, shards: Mapping[str, LocalShard]) -> PlannedSave:
    """Plan a save of `shards`, which `rank` holds, with the simulated ranks of `layout`; write nothing.

    Raises:
        ValueError: the ranks do not hold every element exactly once.
    """
    start = time.perf_counter()
    mine = RankPlan.of(shards)
    sent = message_of(mine)
    rank_seconds = time.perf_counter() - start
    dtype = next(iter(shards.values())).data.dtype
    plans = [
        sent if other == rank else message_of(RankPlan.of(pretended_shards(config, layout, other, dtype)))
        for other in range(layout.world_size)
    ]
    start = time.perf_counter()
    whole = SaveLayout([value_of_message(plan, RankPlan) for plan in plans])
    coordinator_seconds = time.perf_counter() - start
    start = time.perf_counter()
    chunks = own_chunks(mine, shards, whole.skipped[rank])
    rank_seconds += time.perf_counter() - start
    return PlannedSave(
        rank_seconds=rank_seconds,
        rank_plan_bytes=len(sent),
        coordinator_seconds=coordinator_seconds,
        written_bytes=sum(data.nbytes for _, data in chunks),
        written_chunks=len(chunks),
        checkpoint_bytes=sum(prod(shape) for _, shape, _ in whole.tensors.values()) * dtype.itemsize,
    )
