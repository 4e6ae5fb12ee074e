"""Pipeline schedules: the order in which a rank computes forwards and backwards of its chunks. Pure: no torch.

Rank r of p holds `chunks` parts of the model: chunk c is virtual stage c p + r. A schedule is one function from a
`Pipeline` to a list of steps, and a line in SCHEDULES. Everything else of a training step follows from it
(`plan.program`); `price.simulate` says how long it takes. docs/add-a-schedule.md has an example.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple


class Pass(Enum):
    """One direction of computing a chunk for a micro-batch."""

    FORWARD = "F"
    BACKWARD = "B"  # both of the following at once
    BACKWARD_INPUT = "I"  # the gradient of the input, which the stage before waits for
    BACKWARD_WEIGHTS = "W"  # the gradients of the weights, which no other rank waits for


class Step(NamedTuple):
    """One computation of a whole chunk."""

    kind: Pass
    micro_batch: int
    chunk: int = 0


Order = list[Step]
F, B, IN, W = Pass


@dataclass(frozen=True)
class Pipeline:
    """The place of a rank in its pipeline, and the work of one iteration.

    Attributes:
        rank: of `ranks`.
        chunks: virtual stages per rank.
        micro_batches: per iteration.
        backlog: the most micro-batches whose weight gradients wait at once (zero-bubble); None: as the schedule likes.
    """

    rank: int
    ranks: int
    micro_batches: int
    chunks: int = 1
    backlog: int | None = None


def gpipe(p: Pipeline) -> Order:
    """All forwards, then all backwards (Huang 2019). Keeps the activations of every micro-batch."""
    every = range(p.micro_batches)
    return [Step(F, i) for i in every] + [Step(B, i) for i in every]


def one_f_one_b(p: Pipeline) -> Order:
    """Warm-up forwards, then one forward and one backward in turn, then drain (PipeDream-Flush, Narayanan 2021)."""
    warm_up = min(p.ranks - p.rank - 1, p.micro_batches)
    order = [Step(F, i) for i in range(warm_up)]
    for i in range(p.micro_batches - warm_up):
        order += [Step(F, warm_up + i), Step(B, i)]
    return order + [Step(B, i) for i in range(p.micro_batches - warm_up, p.micro_batches)]


def interleaved(p: Pipeline) -> Order:
    """1F1B over several chunks per rank (Narayanan 2021).

    Micro-batches go round in groups of `ranks`, so that the bubble is 1 / chunks as long. Where the ranks do not divide
    the micro-batches, the first group is short: its order is that of a whole group, less the steps of the micro-batches
    that are not there. So ranks still agree on the order of messages, and the bubble is at most that of 1F1B.
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
    """ZB-H1 (Qi 2023): 1F1B whose weight gradients wait.

    Rank r puts off the weight gradients of r micro-batches, or of `backlog` if that is less, and computes them where
    1F1B would wait for a neighbour. The first rank, which has nothing to wait for, puts off none.
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


def forward_only(p: Pipeline) -> Order:
    """Evaluation."""
    return [step for step in interleaved(p) if step.kind is F]


@dataclass(frozen=True)
class Schedule:
    """An order of steps, and which options it knows.

    Attributes:
        virtual_stages: it is made for several chunks per rank.
        backlog: it computes weight gradients later than input gradients.
    """

    order: Callable[[Pipeline], Order]
    virtual_stages: bool = False
    backlog: bool = False


SCHEDULES: dict[str, Schedule] = {  # --pipeline-schedule
    "gpipe": Schedule(gpipe),
    "1f1b": Schedule(one_f_one_b),
    "interleaved": Schedule(interleaved, virtual_stages=True),
    "zero-bubble": Schedule(zero_bubble, backlog=True),
}
EVALUATION = "forward-only"


def order_of(schedule: str, p: Pipeline) -> Order:
    """The steps of one rank under a schedule of SCHEDULES, or of an evaluation (EVALUATION)."""
    return forward_only(p) if schedule == EVALUATION else SCHEDULES[schedule].order(p)


def peak_live(order: Order) -> int:
    """The most (chunk, micro-batch) pairs that a rank holds at once, between their forward and their backward."""
    live = peak = 0
    for kind, _, _ in order:
        live += (kind is F) - (kind in (B, IN))
        peak = max(peak, live)
    return peak
