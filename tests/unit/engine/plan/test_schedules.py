"""Every schedule for every small pipeline: order, memory, time, transfers, deadlock."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from megazero.engine.plan.program.operations import (
    Backward,
    BackwardWeights,
    Forward,
    Op,
    Ops,
    Recv,
    Send,
    Start,
    Transfer,
    Wait,
)
from megazero.engine.plan.program.program import program
from megazero.engine.plan.schedule.schedules import (
    EVALUATION,
    SCHEDULES,
    Costs,
    Order,
    Pass,
    Pipeline,
    order_of,
    placement,
)
from megazero.planner.time.simulate import Timing, simulate
from scripts.draw_schedule import plain_pipeline, thirds
from tests.helpers.live import live_by_chunk, peak_live
from tests.helpers.table import for_each

F, B, IN, W = Pass
KINDS = [*SCHEDULES, EVALUATION]


# Those of the default suite: all take half a minute.
FEW_RANKS, FEW_MICRO_BATCHES = (1, 2, 3, 4, 8), (1, 2, 3, 4, 5, 8, 9, 16)
EVERYTHING = pytest.mark.parametrize("everything", [False, pytest.param(True, marks=pytest.mark.slow)])


def pipelines(kind: str, everything: bool = False) -> Iterator[tuple[int, int, int]]:
    """(ranks, micro-batches, chunks) that a schedule allows: ranks to 8, micro-batches to 16, chunks to 4."""
    virtual = kind == EVALUATION or SCHEDULES[kind].virtual_stages
    for p in range(1 + is_v_shaped(kind), 9) if everything else FEW_RANKS[is_v_shaped(kind) :]:
        for m in range(1, 17) if everything else FEW_MICRO_BATCHES:
            for v in ((2,) if is_v_shaped(kind) else (2, 3, 4)) if virtual and p > 1 else (1,):
                yield p, m, v


def is_v_shaped(kind: str) -> bool:
    return kind != EVALUATION and SCHEDULES[kind].v_shaped


def orders(kind: str, p: int, m: int, v: int, backlog: int | None = None) -> list[Order]:
    return [order_of(kind, Pipeline(rank, p, m, v, backlog, is_v_shaped(kind))) for rank in range(p)]


@EVERYTHING
@for_each("kind", KINDS)
def test_every_chunk_of_every_micro_batch_runs_once_and_forward_first(kind: str, everything: bool) -> None:
    for p, m, v in pipelines(kind, everything):
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


@EVERYTHING
@for_each("kind", KINDS)
def test_no_deadlock_bubbles_as_known_and_transfers_pair_up(kind: str, everything: bool) -> None:
    """The programs run to their end in the simulator, and both ends of every link agree on the order of messages."""
    for p, m, v in pipelines(kind, everything):
        specs = plain_pipeline(p, v, v_shaped=is_v_shaped(kind))
        made = [program(spec, kind, m).gradients for spec in specs]
        timing = simulate(made, thirds)  # raises on a deadlock
        check_bubble(kind, p, m, v, timing)
        sent: dict[tuple[int, int, int], list[Transfer]] = {}
        received: dict[tuple[int, int, int], list[Transfer]] = {}
        for spec, ops in zip(specs, made, strict=True):
            for op in (op.op for op in ops if isinstance(op, Start) and isinstance(op.op, (Send, Recv))):
                step, lane = spec.route(op)
                if isinstance(op, Send):
                    sent.setdefault((spec.pipeline.rank, (spec.pipeline.rank + step) % p, lane), []).append(op)
                else:
                    received.setdefault(((spec.pipeline.rank - step) % p, spec.pipeline.rank, lane), []).append(op)
        assert sent.keys() == received.keys()
        for link, ops in sent.items():
            assert [(o.what, o.to, o.micro_batch) for o in ops] == [
                (o.what, o.to, o.micro_batch) for o in received[link]
            ], (kind, p, m, v, link)
            assert len({op.what for op in ops}) == 1


def check_bubble(kind: str, p: int, m: int, v: int, timing: Timing) -> None:
    """(p - 1) / m for 1F1B and GPipe; 1 / chunks of it interleaved; a third of it for ZB-H1; no schedule has more.

    ZB-V: a sixth, or some passes of a chunk more; with 2 p micro-batches and 2, 4 or 8 ranks a sixth.

    A step of m micro-batches that do not fill the pipeline has a bubble between these. Evaluation: likewise.
    """
    most, bubble = (p - 1) / m, timing.bubble
    assert bubble <= most + 1e-9, (kind, p, m, v)
    if kind == "zero-bubble-v":
        ticks = bubble * 6 * m
        assert ticks >= p - 1 - 1e-9
        assert m < 2 * p or ticks <= p - 1 + 4 * (m > 2 * p or p not in (2, 4, 8)) + 1e-9, (p, m, ticks)
        return
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


def test_chunks_hold_what_their_rank_holds() -> None:
    """Chunks may peak at different times: together they hold at least as many as their rank ever does."""
    for p, m, v in pipelines("interleaved"):
        for order in orders("interleaved", p, m, v):
            held = live_by_chunk(order, v)
            assert len(held) == v and max(held) <= min(m, peak_live(order)) and sum(held) >= peak_live(order)
    assert [live_by_chunk(order, 1) for order in orders("1f1b", 4, 8, 1)] == [(4,), (3,), (2,), (1,)]


def test_a_v_holds_as_much_on_every_rank_as_1f1b_on_the_first() -> None:
    """Chunks between their forward and their weight gradients: 2 p at most, half a rank's layers each."""
    for p, m, v in pipelines("zero-bubble-v"):
        for backlog in (None, 1, 3) if p in (2, 5) else (None,):
            for order in orders("zero-bubble-v", p, m, v, backlog):
                held = most = waiting = 0
                for kind, _, _ in order:
                    held += (kind is F) - (kind is W)
                    waiting += (kind is IN) - (kind is W)
                    most = max(most, held)
                    assert backlog is None or waiting <= 2 * backlog
                assert most <= 2 * min(p, m)


@pytest.mark.long
@pytest.mark.parametrize(
    "costs",
    [Costs(1, 1.3, 0.7), *(pytest.param(c, marks=pytest.mark.second) for c in (Costs(1, 2, 1), Costs(1, 2.2, 0.8)))],
)
def test_a_v_fits_its_order_to_the_costs_of_passes(costs: Costs) -> None:
    """It is faster than ZB-H1, and, unless recompute makes input gradients as long as all else, than interleaved."""

    def cost(op: Op) -> float:
        if isinstance(op, Backward):
            return costs.input_gradient + costs.weight_gradients * op.weights
        return {Forward: costs.forward, BackwardWeights: costs.weight_gradients}.get(type(op), 0.0)

    for p, m in ((2, 8), (3, 7), (4, 8), (4, 16), (8, 16), (8, 32)):
        bubbles = {}
        for kind, schedule in SCHEDULES.items():
            specs = plain_pipeline(p, 1 + schedule.virtual_stages, v_shaped=schedule.v_shaped)
            made = [
                program(replace(spec, pipeline=replace(spec.pipeline, costs=costs)), kind, m).gradients
                for spec in specs
            ]
            bubbles[kind] = simulate(made, cost).bubble
        others = set(bubbles) - {"zero-bubble-v"} - ({"interleaved"} if costs.input_gradient > 2 else set())
        assert all(bubbles["zero-bubble-v"] < bubbles[kind] for kind in others), (p, m, bubbles)


def test_placements() -> None:
    assert placement(3, 1, False) == (0, 1, 2)
    assert placement(3, 2, False) == (0, 1, 2, 0, 1, 2)
    assert placement(3, 2, True) == (0, 1, 2, 2, 1, 0)


def test_an_evaluation_of_a_v_runs() -> None:
    for p in (2, 3, 4):
        for m in (1, 2, 7):
            made = [program(spec, EVALUATION, m).gradients for spec in plain_pipeline(p, 2, v_shaped=True)]
            assert simulate(made, thirds).busy == [2 * m] * p


def test_an_evaluation_computes_forwards_alone() -> None:
    for p, m, v in ((1, 2, 1), (3, 4, 2)):
        made = [program(spec, EVALUATION, m) for spec in plain_pipeline(p, v)]
        assert all(not step.update for step in made)
        kinds = Counter(type(op) for step in made for op in step.gradients)
        assert kinds[Forward] == p * m * v and not kinds[Backward] + kinds[BackwardWeights]


def test_the_simulator_sees_a_deadlock() -> None:
    """Two faults: both wait for the other, and one does not send a message that the other awaits."""
    first, last = (program(spec, "1f1b", 1).gradients for spec in plain_pipeline(2))

    def without(ops: Ops, op_type: type) -> Ops:
        return [op for op in ops if not (isinstance(op, (Start, Wait)) and isinstance(op.op, op_type))]

    with pytest.raises(RuntimeError, match=r"deadlock.*wait Recv dx.*wait Recv x"):
        receives_first = [op for op in first if isinstance(op, (Start, Wait)) and isinstance(op.op, Recv)]
        simulate([receives_first + without(first, Recv), last], thirds)
    with pytest.raises(RuntimeError, match="deadlock"):
        simulate([without(first, Send), last], thirds)
