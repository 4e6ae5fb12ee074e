"""Find slow ranks by their computing time, which excludes waits for other ranks."""

import statistics

import torch

from megazero.engine.mesh.mesh import Mesh
from megazero.engine.plan.program.operations import COMPUTE
from megazero.log import log
from megazero.observe.timeline import Interval

SLOW = 1.2  # times the median of the ranks that compute the same
MOST_NAMED = 8


def computing_seconds(intervals: list[Interval]) -> float:
    """Return this rank's computing time in one iteration."""
    return sum(end - begin for op, begin, end in intervals if isinstance(op, COMPUTE)) / 1e9


def slow_ranks(seconds: list[float], peers: int) -> list[tuple[int, float]]:
    """Return the slow ranks, the slowest first, each with its time divided by the median of its peers.

    Args:
        seconds: computing time of each rank.
        peers: number of neighbouring ranks that compute the same: those of a pipeline stage.
    """
    found = []
    for first in range(0, len(seconds), peers):
        group = seconds[first : first + peers]
        median = statistics.median(group)
        found += [(first + at, own / median) for at, own in enumerate(group) if own > SLOW * median > 0]
    return sorted(found, key=lambda rank: -rank[1])


def report_slow(mesh: Mesh, iteration: int, intervals: list[Interval]) -> dict[str, object]:
    """Compare the ranks' computing times of an iteration, and log the slow ranks. All ranks call this.

    Returns:
        `compute_seconds`: the lowest, the median and the highest of all ranks; only if there are slow ranks also
        `slow_ranks`: rank, host, and time divided by the median of its pipeline stage.
    """
    every = torch.zeros(mesh.world.size, dtype=torch.float64)
    every[mesh.rank] = computing_seconds(intervals)
    seconds = mesh.host.all_reduce_(every, kind="control").tolist()
    record: dict[str, object] = {"compute_seconds": [min(seconds), statistics.median(seconds), max(seconds)]}
    if slow := slow_ranks(seconds, mesh.layout.stride("pp"))[:MOST_NAMED]:
        hosts = mesh.world.hosts or [""] * mesh.world.size
        record["slow_ranks"] = [{"rank": rank, "host": hosts[rank], "times": round(times, 2)} for rank, times in slow]
        texts = [f"rank {rank} ({hosts[rank] or 'this host'}) {times:.1f} x" for rank, times in slow]
        log.info(f"iteration {iteration}: SLOW: {', '.join(texts)} the median computing time of their stage")
    return record
