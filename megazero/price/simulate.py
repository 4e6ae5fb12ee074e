"""Duration of a training step, given the cost of its operations: the programs of all pipeline ranks, played together.

A rank has one stream that computes, and one per axis: Start puts an operation on the stream of its axis, and Wait makes
the computation wait for it. What cannot be started runs on the stream that computes. A message arrives when sender and
receiver have both started it. Layers compute more slowly while a collective runs. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megazero.config.schema import Config
from megazero.plan.layers import Use
from megazero.plan.operations import (
    COMPUTE,
    Asynchronous,
    Backward,
    BackwardWeights,
    Forward,
    Op,
    Ops,
    Recv,
    Send,
    Start,
    Transfer,
    Update,
    Wait,
    axis_of,
    inner,
    name_of,
)
from megazero.plan.program import program
from megazero.plan.rank_spec import Layer, RankSpec, Unit
from megazero.plan.schedules import SCHEDULES
from megazero.plan.topology import Layout
from megazero.plan.zero_policy import sharding_groups

Cost = Callable[[Op], float]


class Span(NamedTuple):
    """One computation on the time line of a rank."""

    op: Op
    begin: float
    end: float


class Timing(NamedTuple):
    """Duration of a step, in the unit of its costs.

    Attributes:
        busy: per rank, time in which it computes.
        spans: per rank, its computations, in order.
        spent: per rank, where its time went: under the names of operations that ran; under an axis, time in which it
            waited for a transfer; under "issue", time in which it started transfers; under "bubble", time in which it
            waited until a neighbour had begun one.
    """

    seconds: float
    busy: list[float]
    spans: list[list[Span]]
    spent: list[defaultdict[str, float]]

    @property
    def bubble(self) -> float:
        """Idle time over computing time, of the busiest rank: (p - 1) / m for 1F1B."""
        return self.seconds / max(self.busy) - 1


class _Rank:
    """One rank's place in its program while it is played."""

    def __init__(self, ops: Ops, issue: float, overlap: float) -> None:
        self.ops, self.at, self.now, self.issue, self.overlap = ops, 0, 0.0, issue, overlap
        self.free: dict[str, float] = {}  # axis -> when its stream has nothing left to do
        self.done: dict[Op, float] = {}  # operation in flight -> when it ends
        self.spans: list[Span] = []
        self.spent = defaultdict[str, float](float)

    def wait(self, until: float, name: str) -> None:
        """Go on at `until`, if that is later than now."""
        if until > self.now:
            self.spent[name] += until - self.now
            self.now = until

    def run(self, op: Op, seconds: float) -> None:
        self.spent[type(op).__name__] += seconds
        self.now += seconds

    def slowed(self, seconds: float) -> float:
        """Seconds of a computation that begins now, next to the collectives in flight."""
        last = max((end for axis, end in self.free.items() if axis != "host"), default=0.0)
        shared = min(max(0.0, last - self.now), seconds * (1 + self.overlap))
        return seconds + shared * self.overlap / (1 + self.overlap)

    def begin_transfer(self) -> None:
        if self.issue:
            self.spent["issue"] += self.issue
            self.now += self.issue

    def advance(self, posted: dict[Transfer, float], cost: Cost) -> bool:
        """Play on until a message is missing. Return whether anything was played."""
        begin = self.at
        while self.at < len(self.ops) and self._play(self.ops[self.at], posted, cost):
            self.at += 1
        return self.at > begin

    def _play(self, op: Op, posted: dict[Transfer, float], cost: Cost) -> bool:
        about = inner(op)
        if isinstance(about, Transfer):
            if not isinstance(op, Wait):
                if about not in posted:  # played again once its mate has begun
                    self.begin_transfer()
                posted[about] = self.now
            if not isinstance(op, Start):
                mate = (Send if isinstance(about, Recv) else Recv)(about.what, about.to, about.micro_batch)
                if mate not in posted:
                    return False
                begin = max(posted[mate], posted[about])
                self.wait(begin, "bubble")
                self.wait(begin + cost(about), "pp")
        elif isinstance(op, Wait):
            self.wait(self.done.get(about, 0.0), axis_of(about))
        elif isinstance(op, COMPUTE):
            begin = self.now
            self.run(op, self.slowed(cost(op)))
            self.spans.append(Span(op, begin, self.now))
        elif isinstance(about, Asynchronous) and not isinstance(op, Update):  # one that stands alone computes
            axis, seconds = axis_of(about), cost(about)
            if seconds:  # an axis of one rank has nothing to start
                self.begin_transfer()
            self.free[axis] = self.done[about] = max(self.now, self.free.get(axis, 0.0)) + seconds
            if not isinstance(op, Start):
                self.wait(self.done[about], axis)
        else:
            self.run(op, cost(op))
        return True


def simulate(programs: list[Ops], cost: Cost | Sequence[Cost], issue: float = 0.0, overlap: float = 0.0) -> Timing:
    """Play the programs of the ranks of one pipeline, at one cost for all or one for each.

    Args:
        issue: time in which a rank does not compute, for each transfer that it starts.
        overlap: share by which a computation takes longer while a collective runs.

    Raises:
        RuntimeError: they deadlock; it says where every rank waits.
    """
    ranks = [_Rank(ops, issue, overlap) for ops in programs]
    costs = [cost] * len(ranks) if callable(cost) else cost
    posted: dict[Transfer, float] = {}
    while any(rank.at < len(rank.ops) for rank in ranks):
        moved = [rank.advance(posted, own) for rank, own in zip(ranks, costs, strict=True)]
        if not any(moved):
            waiting = [name_of(rank.ops[rank.at]) if rank.at < len(rank.ops) else "its end" for rank in ranks]
            raise RuntimeError(f"pipeline deadlock; the ranks wait at {waiting}")
    busy = [sum(span.end - span.begin for span in rank.spans) for rank in ranks]
    spent = [rank.spent for rank in ranks]
    return Timing(max(rank.now for rank in ranks), busy, [rank.spans for rank in ranks], spent)


# -- schedules alone


def plain_pipeline(ranks: int, chunks: int = 1, layers: int = 1, v_shaped: bool = False) -> list[RankSpec]:
    """A pipeline of equal layers, `layers` per chunk, without embedding, head or ZeRO."""
    found, alone = [], sharding_groups(Config(), Layout())
    for rank in range(ranks):
        names = [[f"{c}.{n}" for n in range(layers)] for c in range(chunks)]
        made = [
            tuple(Layer(name, (name,), Use.LAYER, True, rank + c > 0 or n > 0, name) for n, name in enumerate(chunk))
            for c, chunk in enumerate(names)
        ]
        units = {name: Unit(64, True) for chunk in names for name in chunk}
        found.append(RankSpec(tuple(made), units, alone, rank, ranks, v_shaped=v_shaped))
    return found


def thirds(op: Op) -> float:
    """Cost where a forward, an input gradient and a weight gradient take 1 each, and nothing else takes time."""
    if isinstance(op, Backward):
        return 2.0 if op.weights else 1.0
    return float(isinstance(op, (Forward, BackwardWeights)))


def play(schedule: str, ranks: int, micro_batches: int, chunks: int = 1, layers: int = 1) -> Timing:
    """Simulate a schedule on a plain pipeline with the costs of `thirds`."""
    specs = plain_pipeline(ranks, chunks, layers, schedule in SCHEDULES and SCHEDULES[schedule].v_shaped)
    return simulate([program(spec, schedule, micro_batches).gradients for spec in specs], thirds)
