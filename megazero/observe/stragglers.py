"""Slow ranks, found by the time that each spends computing: what it waits for is another rank's time."""

from __future__ import annotations

import statistics

import torch

from megazero.comm.mesh.mesh import Mesh
from megazero.log import log
from megazero.observe.timeline import Span
from megazero.plan.program.operations import COMPUTE

SLOW = 1.2  # times the median of the ranks that compute the same
MOST_NAMED = 8


def computing_seconds(spans: list[Span]) -> float:
    """Time of one iteration in which this rank computed."""
    return sum(end - begin for op, begin, end in spans if isinstance(op, COMPUTE)) / 1e9


def slow_ranks(seconds: list[float], peers: int, slow: float = SLOW) -> list[tuple[int, float]]:
    """Return (rank, times the median of its peers) of the ranks that are slow, the slowest first.

    `peers`: neighbouring ranks that compute the same: those of a pipeline stage.
    """
    found = []
    for first in range(0, len(seconds), peers):
        group = seconds[first : first + peers]
        median = statistics.median(group)
        found += [(first + at, own / median) for at, own in enumerate(group) if own > slow * median > 0]
    return sorted(found, key=lambda rank: -rank[1])


def report(mesh: Mesh, iteration: int, spans: list[Span]) -> dict[str, object]:
    """Compare the ranks' computing times of an iteration. All ranks call this.

    Returns:
        `compute_seconds`: the lowest, the median and the highest of all ranks; `slow_ranks`: rank, host, and times the
        median of its pipeline stage, only where there are any.
    """
    world = mesh.world
    every = torch.zeros(world.size, dtype=torch.float64)
    every[mesh.rank] = computing_seconds(spans)
    seconds = mesh.host.all_reduce_(every, kind="control").tolist()
    record: dict[str, object] = {"compute_seconds": [min(seconds), statistics.median(seconds), max(seconds)]}
    slow = slow_ranks(seconds, mesh.layout.stride("pp"))
    if slow:
        hosts = world.hosts or [""] * world.size
        named = [{"rank": rank, "host": hosts[rank], "times": round(times, 2)} for rank, times in slow[:MOST_NAMED]]
        record["slow_ranks"] = named
        texts = [f"rank {rank} ({hosts[rank] or 'this host'}) {times:.1f} x" for rank, times in slow[:MOST_NAMED]]
        log.info(f"iteration {iteration}: SLOW: {', '.join(texts)} the median computing time of their stage")
    return record
