"""Planning a save among ranks that are not there: what each would tell rank 0, and rank 0's part of the work."""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.planner import SavePlan

from megazero.checkpoint.planning import CoveredSavePlanner, RankPlan, SaveLayout
from megazero.checkpoint.shards import LocalShard
from megazero.config.schema import Config
from megazero.model.stage import declare
from megazero.plan.owned import rank_parts
from megazero.plan.topology import Layout


class PlannedSave(NamedTuple):
    """The plan of one rank's part of a save, and of the whole."""

    rank_seconds: float  # that this rank plans
    rank_plan_bytes: int  # that it sends to rank 0
    coordinator_seconds: float  # that rank 0 reads the plans of all ranks, and proves that they cover every tensor
    written_bytes: int  # of tensors, by this rank
    written_chunks: int
    checkpoint_bytes: int  # of tensors, by all ranks


def pretended_shards(config: Config, layout: Layout, rank: int, dtype: torch.dtype) -> dict[str, LocalShard]:
    """Return the shards that a rank saves, on stand-in tensors. `config` is resolved."""
    states = ("model", *(state.name for state in config.optimizer.rule.states))  # in the order of `Engine.shards`
    found = {}
    for part in rank_parts(config, layout, rank, declare):
        data = torch.empty(part.stop - part.start, device="meta", dtype=dtype)
        shard = LocalShard(part.spec.shape, part.block.offset, part.block.shape, part.start, part.stop, data)
        found |= {f"{state}.{part.spec.name}": shard for state in states}
    return found


def plan_save(config: Config, layout: Layout, rank: int, shards: Mapping[str, LocalShard]) -> PlannedSave:
    """Plan a save of `shards`, which `rank` holds, among the pretended ranks of `layout`; write nothing.

    Raises:
        ValueError: the ranks do not hold every element exactly once.
    """
    planner, start = CoveredSavePlanner(shards), time.perf_counter()
    sent = pickle.dumps(planner.create_local_plan().planner_data)
    rank_seconds = time.perf_counter() - start
    dtype = next(iter(shards.values())).data.dtype
    others = range(layout.world_size)
    plans = [
        sent if other == rank else pickle.dumps(RankPlan.of(pretended_shards(config, layout, other, dtype)))
        for other in others
    ]
    start = time.perf_counter()
    whole = SaveLayout([pickle.loads(plan) for plan in plans])
    coordinator_seconds = time.perf_counter() - start
    start = time.perf_counter()
    items = planner.finish_plan(SavePlan([], planner_data=whole.skipped[rank])).items
    rank_seconds += time.perf_counter() - start
    itemsize = dtype.itemsize
    return PlannedSave(
        rank_seconds,
        len(sent),
        coordinator_seconds,
        sum(planner.resolve_data(item).numel() for item in items) * itemsize,
        len(items),
        sum(torch.Size(shape).numel() for _, shape, _ in whole.tensors.values()) * itemsize,
    )
