"""Every schedule for every small pipeline: order, memory, time, transfers, deadlock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from megazero.plan.operations import Backward, BackwardWeights, Forward, Ops, Recv, Send, Start, Wait
from megazero.plan.program import program
from megazero.plan.schedules import EVALUATION, SCHEDULES, Order, Pass, Pipeline, order_of, peak_live
from megazero.price.simulate import Timing, plain_pipeline, simulate, thirds

F, B, IN, W = Pass
KINDS = [*SCHEDULES, EVALUATION]


def pipelines(kind: str) -> Iterator[tuple[int, int, int]]:
    """(ranks, micro-batches, chunks) that a schedule allows: ranks to 8, micro-batches to 16, chunks to 4."""
    virtual = kind == EVALUATION or SCHEDULES[kind].virtual_stages
    for p in range(1, 9):
        for m in range(1, 17):
            for v in (2, 3, 4) if virtual and p > 1 else (1,):
                yield p, m, v


def orders(kind: str, p: int, m: int, v: int, backlog: int | None = None) -> list[Order]:
    return [order_of(kind, Pipeline(rank, p, m, v, backlog)) for rank in range(p)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_chunk_of_every_micro_batch_runs_once_and_forward_first(kind: str) -> None:
    for p, m, v in pipelines(kind):
        for order in orders(kind, p, m, v):
            every = {(i, c) for i in range(m) for c in range(v)}
            at = {step: n for n, step in enumerate(order)}
            assert len(at) == len(order)
            made = {k: {(i, c) for step_kind, i, c in order if step_kind is k} for k in Pass}
            assert made[F] == every and made[B] | made[IN] == (set() if kind == EVALUATION else every)
            assert made[IN] == made[W] and not made[IN] & made[B]
            for kind_, i, c in order:
                if kind_ in (B, IN):
                    assert at[(F, i, c)] < at[(kind_, i, c)]
                if kind_ is W:
                    assert at[(IN, i, c)] < at[(W, i, c)]


@pytest.mark.parametrize("kind", KINDS)
def test_no_deadlock_bubbles_as_known_and_transfers_pair_up(kind: str) -> None:
    """The programs run to their end in the simulator, and both ends of every link agree on the order of messages."""
    for p, m, v in pipelines(kind):
        made = [program(spec, kind, m).gradients for spec in plain_pipeline(p, v)]
        timing = simulate(made, thirds)  # raises on a deadlock
        check_bubble(kind, p, m, v, timing)
        for rank in range(p if v > 1 and p > 2 else p - 1):
            here, there = made[rank], made[(rank + 1) % p]
            for what, step, sender, receiver in (("x", 1, here, there), ("dx", -1, there, here)):
                sent = [
                    op.op for op in sender if isinstance(op, Start) and isinstance(op.op, Send) and op.op.what == what
                ]
                got = [
                    op.op for op in receiver if isinstance(op, Start) and isinstance(op.op, Recv) and op.op.what == what
                ]
                to = [(op.to, op.micro_batch) for op in sent if op.to % p == (rank + (step > 0)) % p]
                assert to == [(op.to, op.micro_batch) for op in got if (op.to - step) % p == (rank + (step < 0)) % p]


def check_bubble(kind: str, p: int, m: int, v: int, timing: Timing) -> None:
    """(p - 1) / m for 1F1B and GPipe; 1 / chunks of it interleaved; a third of it for ZB-H1; for no schedule more.

    A step of m micro-batches that do not fill the pipeline has a bubble between these. Evaluation: likewise.
    """
    most, bubble = (p - 1) / m, timing.bubble
    assert bubble <= most + 1e-9, (kind, p, m, v)
    if not (kind == "zero-bubble" and m < p) and not (v > 1 and m % p):
        known = most / v / (3 if kind == "zero-bubble" else 1)
        assert bubble == pytest.approx(known), (kind, p, m, v)


def test_a_backlog_of_nothing_is_1f1b_and_more_is_faster() -> None:
    """--zero-bubble-backlog bounds how many micro-batches' weight gradients wait."""
    for p, m in ((4, 8), (8, 16)):
        most = []
        for backlog in (0, 1, 2, None):
            waiting = []
            for order in orders("zero-bubble", p, m, 1, backlog):
                now = peak = 0
                for kind, _, _ in order:
                    now += (kind is IN) - (kind is W)
                    peak = max(peak, now - (kind is IN))  # the one just done is not waiting yet
                waiting.append(peak)
            most.append(max(waiting))
        assert most[:3] == [0, 1, 2] and most[3] == p - 1


def test_peak_of_held_micro_batches() -> None:
    """1F1B holds min(p - r, m) micro-batches, GPipe all m."""
    for p, m, _ in pipelines("1f1b"):
        assert [peak_live(order) for order in orders("1f1b", p, m, 1)] == [min(p - r, m) for r in range(p)]
        assert [peak_live(order) for order in orders("gpipe", p, m, 1)] == [m] * p


def test_an_evaluation_computes_forwards_alone() -> None:
    for p, m, v in ((1, 2, 1), (3, 4, 2)):
        made = [program(spec, EVALUATION, m) for spec in plain_pipeline(p, v)]
        assert all(not step.update for step in made)
        kinds = Counter(type(op) for step in made for op in step.gradients)
        assert kinds[Forward] == p * m * v and not kinds[Backward] + kinds[BackwardWeights]


def test_the_simulator_sees_a_deadlock() -> None:
    """Two ways: both wait for the other, and one does not send what the other awaits."""
    first, last = (program(spec, "1f1b", 1).gradients for spec in plain_pipeline(2))

    def without(ops: Ops, op_type: type) -> Ops:
        return [op for op in ops if not (isinstance(op, (Start, Wait)) and isinstance(op.op, op_type))]

    with pytest.raises(RuntimeError, match=r"deadlock.*wait Recv dx.*wait Recv x"):
        receives_first = [op for op in first if isinstance(op, (Start, Wait)) and isinstance(op.op, Recv)]
        simulate([receives_first + without(first, Recv), last], thirds)
    with pytest.raises(RuntimeError, match="deadlock"):
        simulate([without(first, Send), last], thirds)
