"""Duration of a training step, given the cost of each operation: simulates the programs of all pipeline ranks.

A rank has one compute stream, and one stream per axis: Start puts an operation on the stream of its axis, and Wait
makes the compute stream wait for it. All other operations run on the compute stream. A message is sent once sender and
receiver have both started it. Layers slow down while a collective runs. Pure.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megazero.engine.plan.program.operations import (
    COMPUTE,
    HOST_COPIES,
    Asynchronous,
    Fetch,
    Op,
    Ops,
    Recv,
    Send,
    Start,
    SumReplicated,
    SumTied,
    Transfer,
    Wait,
    inner,
    name_of,
)

CostOf = Callable[[Op], float]


class Computation(NamedTuple):
    """An operation of COMPUTE, and when it ran."""

    op: Op
    begin: float
    end: float


class Timing(NamedTuple):
    """Duration of a step, in the unit of its costs.

    Attributes:
        busy: per rank, compute time.
        spans: per rank, its computations, in order.
        spent: per rank, time by cause: an operation's name (it ran), an axis (waiting for a transfer along it), "issue"
            (starting transfers) or "bubble" (waiting until a neighbour started a transfer).
    """

    seconds: float
    busy: list[float]
    spans: list[list[Computation]]
    spent: list[defaultdict[str, float]]

    @property
    def bubble(self) -> float:
        """Idle time over compute time of the busiest rank: (p - 1) / m for 1F1B."""
        return self.seconds / max(self.busy) - 1


class _Rank:
    """The state of one rank during the simulation."""

    def __init__(self, ops: Ops, issue: float, overlap: float) -> None:
        self.ops, self.at, self.now, self.issue, self.overlap = ops, 0, 0.0, issue, overlap
        self.free: dict[str, float] = {}  # axis -> when its stream becomes idle
        self.done: dict[Op, float] = {}  # operation in flight -> when it ends
        self.spans: list[Computation] = []
        self.spent = defaultdict[str, float](float)

    def wait(self, until: float, name: str) -> None:
        """Idle up to `until`, if that is later than now. name: the cause, a key of `spent`."""
        if until > self.now:
            self.spent[name] += until - self.now
            self.now = until

    def run(self, op: Op, seconds: float) -> None:
        self.spent[type(op).__name__] += seconds
        self.now += seconds

    def slowed(self, seconds: float) -> float:
        """Return the seconds of a computation that begins now, slowed down by the collectives in flight."""
        last = max((end for axis, end in self.free.items() if axis != "host"), default=0.0)
        shared = min(max(0.0, last - self.now), seconds * (1 + self.overlap))
        return seconds + shared * self.overlap / (1 + self.overlap)

    def begin_transfer(self) -> None:
        if self.issue:
            self.spent["issue"] += self.issue
            self.now += self.issue

    def advance(self, posted: dict[Transfer, float], cost: CostOf) -> bool:
        """Run operations until a message is missing. Return whether any ran."""
        begin = self.at
        while self.at < len(self.ops) and self._run_one(self.ops[self.at], posted, cost):
            self.at += 1
        return self.at > begin

    def _run_one(self, op: Op, posted: dict[Transfer, float], cost: CostOf) -> bool:
        about = inner(op)
        if isinstance(about, Transfer):
            if not isinstance(op, Wait):
                if about not in posted:  # tried again once its counterpart has begun
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
            self.spans.append(Computation(op, begin, self.now))
        elif isinstance(about, Asynchronous):
            axis, seconds = axis_of(about), cost(about)
            if seconds:  # 0 along an axis of one rank
                self.begin_transfer()
            self.free[axis] = self.done[about] = max(self.now, self.free.get(axis, 0.0)) + seconds
            if not isinstance(op, Start):
                self.wait(self.done[about], axis)
        else:
            self.run(op, cost(op))
        return True


def axis_of(op: Op) -> str:
    """Return the stream of an asynchronous operation: dp, tp, pp, or host for host memory and files."""
    if isinstance(op, (Fetch, *HOST_COPIES)):
        return "host"
    if isinstance(op, (Transfer, SumTied)):
        return "pp"
    return "tp" if isinstance(op, SumReplicated) else "dp"


def simulate(programs: list[Ops], cost: CostOf | Sequence[CostOf], issue: float = 0.0, overlap: float = 0.0) -> Timing:
    """Simulate the programs of the ranks of one pipeline.

    Args:
        cost: of an operation, for all ranks or one per rank.
        issue: compute time that a rank loses for each transfer that it starts.
        overlap: fraction by which a computation slows down while a collective runs.

    Raises:
        RuntimeError: a deadlock; names the operation at which each rank waits.
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
