"""Pipeline schedules: the order in which a rank computes forwards and backwards of its chunks. Pure: no torch.

A rank holds `chunks` virtual stages of the model, assigned by `placement`. A schedule is one function from a `Pipeline`
to a list of steps, and a line in SCHEDULES. `engine.plan.program.program` derives the training step from it, and
`planner.time.simulate` its duration. docs/extending.md has an example.
"""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple


def placement(ranks: int, chunks: int, v_shaped: bool) -> tuple[int, ...]:
    """Return the rank of every virtual stage: 0 .. p-1, 0 .. p-1, and so on; V-shaped: 0 .. p-1, p-1 .. 0.

    Chunk c of a rank is the c-th of its virtual stages.
    """
    down, up = tuple(range(ranks)), tuple(reversed(range(ranks)))
    return tuple(rank for c in range(chunks) for rank in (up if v_shaped and c % 2 else down))


class Pass(Enum):
    """One direction of computing a chunk for a micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"  # both of the following at once
    BACKWARD_INPUT = "I"  # the gradient of the input, needed by the previous stage
    BACKWARD_WEIGHTS = "W"  # the gradients of the weights, needed by no other rank


class Step(NamedTuple):
    """One computation of a whole chunk."""

    kind: Pass
    micro_batch: int
    chunk: int = 0


Order = list[Step]
F, B, IN, W = Pass


class Costs(NamedTuple):
    """Time of a chunk's passes, in one unit."""

    forward: float = 1.0
    input_gradient: float = 1.0  # recompute included
    weight_gradients: float = 1.0


EQUAL = Costs()


@dataclass(frozen=True)
class Pipeline:
    """A pipeline, one of its ranks, and the work of one iteration.

    Attributes:
        chunks: virtual stages per rank.
        micro_batches: of the iteration.
        backlog: the most micro-batches with queued weight gradients (zero-bubble); None: the schedule's own limit.
        v_shaped: the placement of virtual stages.
        costs: of a chunk's passes, for schedules whose order depends on them.
    """

    rank: int = 0
    ranks: int = 1
    micro_batches: int = 1
    chunks: int = 1
    backlog: int | None = None
    v_shaped: bool = False
    costs: Costs = EQUAL


def gpipe(p: Pipeline) -> Order:
    """All forwards, then all backwards (Huang 2019). Holds the activations of every micro-batch."""
    every = range(p.micro_batches)
    return [Step(F, i) for i in every] + [Step(B, i) for i in every]


def one_f_one_b(p: Pipeline) -> Order:
    """Warm-up forwards, then alternating forwards and backwards, then drain (PipeDream-Flush, Narayanan 2021)."""
    warm_up = min(p.ranks - p.rank - 1, p.micro_batches)
    order = [Step(F, i) for i in range(warm_up)]
    for i in range(p.micro_batches - warm_up):
        order += [Step(F, warm_up + i), Step(B, i)]
    return order + [Step(B, i) for i in range(p.micro_batches - warm_up, p.micro_batches)]


def interleaved(p: Pipeline) -> Order:
    """1F1B over several chunks per rank (Narayanan 2021).

    Each group of `ranks` micro-batches passes all chunks in turn, so that the bubble is 1 / chunks as long. If `ranks`
    does not divide the number of micro-batches, the first group is short: its order is that of a whole group without
    the missing micro-batches. So ranks still agree on the order of messages, and the bubble is at most that of 1F1B.
    """
    missing = -p.micro_batches % p.ranks
    whole = _interleaved(replace(p, micro_batches=p.micro_batches + missing))
    return [step._replace(micro_batch=step.micro_batch - missing) for step in whole if step.micro_batch >= missing]


def _interleaved(p: Pipeline) -> Order:
    """`interleaved` for whole groups."""
    total = p.micro_batches * p.chunks
    warm_up = min(total, 2 * (p.ranks - p.rank - 1) + (p.chunks - 1) * p.ranks)

    def step(kind: Pass, k: int) -> Step:
        group, at = divmod(k, p.ranks * p.chunks)
        chunk, i = divmod(at, p.ranks)
        return Step(kind, group * p.ranks + i, chunk if kind is F else p.chunks - 1 - chunk)

    order = [step(F, k) for k in range(warm_up)]
    for k in range(total - warm_up):
        order += [step(F, warm_up + k), step(B, k)]
    return order + [step(B, k) for k in range(total - warm_up, total)]


def zero_bubble(p: Pipeline) -> Order:
    """ZB-H1 (Qi 2023): 1F1B with queued weight gradients.

    Rank r queues the weight gradients of r micro-batches, or of `backlog` if that is less, and computes them where 1F1B
    would wait for a neighbour. The first rank never waits, and queues none.
    """
    behind = p.rank if p.backlog is None else min(p.rank, p.backlog)
    if not behind:
        return one_f_one_b(p)
    order: Order = []
    for kind, i, _ in one_f_one_b(p):
        order.append(Step(F if kind is F else IN, i))
        if kind is B and i >= behind:
            order.append(Step(W, i - behind))
    return order + [Step(W, i) for i in range(max(0, p.micro_batches - behind), p.micro_batches)]


def zero_bubble_v(p: Pipeline) -> Order:
    """ZB-V (Qi 2023): two chunks per rank, placed as a V, with weight gradients where a rank would wait.

    A rank holds at most 2 p chunks between forward and weight gradients, as the first rank does under 1F1B. If all
    three passes take the same time, the bubble is half of ZB-H1's. The order depends on the costs of the passes.
    """
    return _v_orders(p.ranks, p.micro_batches, p.backlog, p.costs)[p.rank]


@functools.lru_cache(maxsize=256)
def _v_orders(ranks: int, micro_batches: int, backlog: int | None, costs: Costs) -> list[Order]:
    """Return the orders of all ranks: the fastest result of greedy simulations with different preferences."""
    most = 8 if ranks * micro_batches <= 4096 else 1  # because one simulation takes seconds
    preferences = itertools.product((-1, 1), ("IFWf", "IFfW", "FIfW", "FfIW"))
    found = [_V(ranks, micro_batches, backlog, costs, *one) for one in itertools.islice(preferences, most)]
    return min(found, key=lambda v: v.seconds).orders


class _V:
    """A greedy simulation of the V.

    A rank runs the pass that it can start first; of several, the first in `wanted`: I, an input gradient; W, the oldest
    queued weight gradients; F and f, a forward of chunk 1 and of chunk 0. Chunk 0 starts no more micro-batches than
    return as chunk 1 in time, and leaves one chunk of the limit of activations to chunk 1.
    """

    def __init__(
        self, ranks: int, micro_batches: int, backlog: int | None, costs: Costs, first: int, wanted: str
    ) -> None:
        """Run the simulation. first: if several ranks can start at the same time, 1: the first starts; -1: the last."""
        self.ranks, self.last, self.micro_batches, self.wanted = ranks, 2 * ranks - 1, micro_batches, wanted
        self.costs = dict(zip((F, IN, W), costs, strict=True))
        self.backlog = 2 * (backlog or micro_batches)  # in chunks
        self.orders: list[Order] = [[] for _ in range(ranks)]
        self.waiting: list[list[Step]] = [[] for _ in range(ranks)]  # weight gradients
        # pass -> virtual stage -> when the pass of each micro-batch ended; stages beyond the ends have always ended
        self.ended: dict[Pass, dict[int, list[float]]] = {
            kind: {stage: [] for stage in range(2 * ranks)} | dict.fromkeys((-1, 2 * ranks), [0.0] * micro_batches)
            for kind in (F, IN)
        }
        self.ended[IN][2 * ranks] = self.ended[F][self.last]
        self.free = [0.0] * ranks  # when a rank becomes idle
        best = [self._best(rank) for rank in range(ranks)]
        for _ in range(6 * micro_batches * ranks):
            rank = min(range(ranks)[::first], key=lambda r: best[r][0])
            self._take(rank, *best[rank])
            for near in range(max(0, rank - 1), min(ranks, rank + 2)):
                best[near] = self._best(near)
        self.seconds = max(self.free)

    def _best(self, rank: int) -> tuple[float, Step]:
        """Return when a rank can start its next pass (inf: another rank must run first), and the pass."""
        m, waiting, never = self.micro_batches, self.waiting[rank], (math.inf, Step(F, 0))
        (f0, f1), (i0, i1) = ([len(self.ended[kind][stage]) for stage in (rank, self.last - rank)] for kind in (F, IN))
        held = f0 + f1 - (i0 + i1 - len(waiting))  # between their forward and their weight gradients
        ready = dict.fromkeys(self.wanted, never)
        if waiting:
            ready["W"] = self.free[rank], waiting[0]
        if len(waiting) < self.backlog:
            found = [self._start(rank, Step(IN, i, c)) for c, i in ((1, i1), (0, i0)) if i < (f0, f1)[c]]
            ready["I"] = min(found, key=lambda one: one[0], default=never)
        if f1 < m and held < 2 * self.ranks:
            ready["F"] = self._start(rank, Step(F, f1, 1))
        if f0 < min(m, f1 + 2 * (self.ranks - rank) - 1) and held < 2 * self.ranks - 1:
            ready["f"] = self._start(rank, Step(F, f0, 0))
        return min(ready.values(), key=lambda one: one[0])  # of several, the first in `wanted`

    def _stage(self, rank: int, step: Step) -> int:
        return self.last - rank if step.chunk else rank

    def _start(self, rank: int, step: Step) -> tuple[float, Step]:
        """Return when a pass can start: after this pass of the previous stage, and once the last message is received.

        A rank sends one message at a time in each direction: the next stage must have started the previous micro-batch.
        """
        ended, stage, way = self.ended[step.kind], self._stage(rank, step), 1 if step.kind is F else -1
        before, after = ended[stage - way], ended[stage + way]
        if not len(before) > step.micro_batch <= len(after):
            return math.inf, step
        return max(self.free[rank], before[step.micro_batch]), step

    def _take(self, rank: int, begin: float, step: Step) -> None:
        assert begin < math.inf, "the V is stuck"
        self.orders[rank].append(step)
        self.free[rank] = begin + self.costs[step.kind]
        if step.kind is W:
            self.waiting[rank].pop(0)
            return
        self.ended[step.kind][self._stage(rank, step)].append(self.free[rank])
        if step.kind is IN:
            self.waiting[rank].append(step._replace(kind=W))


def forward_only(p: Pipeline) -> Order:
    """The forwards of a schedule alone, for evaluation."""
    return [step for step in (zero_bubble_v if p.v_shaped else interleaved)(p) if step.kind is F]


@dataclass(frozen=True)
class Schedule:
    """An order of steps, and the options that it supports.

    Attributes:
        virtual_stages: several chunks per rank.
        v_shaped: two chunks per rank, virtual stages r and 2 p - 1 - r of rank r.
        backlog: queued weight gradients.
        holds_all: activations of all micro-batches are held, not only of those in the pipeline.
        periodic: after the first round of the pipeline.
        idle: idle time, as a share of that of 1F1B with as many chunks.
        tried: chunks per rank that a search tries; empty: it does not try the schedule.
    """

    order: Callable[[Pipeline], Order]
    virtual_stages: bool = False
    backlog: bool = False
    v_shaped: bool = False
    holds_all: bool = False
    periodic: bool = False
    idle: float = 1.0
    tried: tuple[int, ...] = (1,)


SCHEDULES: dict[str, Schedule] = {  # --pipeline-schedule
    "gpipe": Schedule(gpipe, holds_all=True, tried=()),
    "1f1b": Schedule(one_f_one_b, periodic=True),
    "interleaved": Schedule(interleaved, virtual_stages=True, periodic=True, tried=(2, 3, 4, 6, 8)),
    "zero-bubble": Schedule(zero_bubble, backlog=True, idle=1 / 3),
    # its two chunks are counted in `idle`
    "zero-bubble-v": Schedule(zero_bubble_v, virtual_stages=True, backlog=True, v_shaped=True, idle=1 / 3, tried=(2,)),
}
EVALUATION = "forward-only"


def order_of(schedule: str, p: Pipeline) -> Order:
    """Return the steps of one rank under a schedule of SCHEDULES, or under EVALUATION."""
    return forward_only(p) if schedule == EVALUATION else SCHEDULES[schedule].order(p)
