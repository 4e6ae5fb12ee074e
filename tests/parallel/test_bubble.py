"""The measured bubble equals the simulated one if operations take the simulated times; no clock is read here."""

import time

import pytest

from megazero.engine.plan.program.operations import (
    Backward,
    BackwardWeights,
    Forward,
    GradNorm,
    Op,
    Recompute,
    Recv,
    Wait,
)
from megazero.engine.plan.program.program import program
from megazero.engine.plan.schedule.schedules import SCHEDULES
from megazero.observe.bubble import BubbleMeter, StageTimes, bubble, stage_times
from megazero.observe.timeline import Interval
from megazero.planner.time.simulate import Timing, simulate
from scripts.draw_schedule import play
from tests.parallel.cases import Case, new_engine

SECOND = 10**9  # ns


def spans_of(timing: Timing, rank: int) -> list[Interval]:
    """Return the spans of a timeline: the computations, and between them the waits for messages."""
    found, at = [], 0
    for op, begin, end in timing.spans[rank]:
        if begin * SECOND > at:
            found.append(Interval(Wait(Recv("x", 0, len(found))), at, round(begin * SECOND)))
        at = round(end * SECOND)
        found.append(Interval(op, round(begin * SECOND), at))
    # time after the last computation, such as the wait for the norm of all ranks, is idle time only up to the end
    # of the last stage's computation
    return [*found, Interval(GradNorm(), at, round((timing.seconds + 7) * SECOND))]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 4), (4, 8)])
def test_measured_equals_simulated_on_the_simulations_own_time_line(
    schedule: str, ranks: int, micro_batches: int
) -> None:
    timing = play(schedule, ranks, micro_batches, chunks=1 + SCHEDULES[schedule].virtual_stages)
    found = bubble([stage_times(spans_of(timing, rank)) for rank in range(ranks)])
    assert found == pytest.approx(timing.bubble, abs=1e-9)
    if schedule in ("1f1b", "gpipe"):
        assert found == pytest.approx((ranks - 1) / micro_batches, abs=1e-9)


def test_idle_time_is_that_of_the_stage_that_computes_longest() -> None:
    stages = [StageTimes(computing=4.0, waiting=1.0, until=6.0), StageTimes(computing=8.0, waiting=0.5, until=9.0)]
    assert bubble(stages) == pytest.approx(0.5 / 8)
    stages[0] = stages[0]._replace(until=10.0)
    assert bubble(stages) == pytest.approx((0.5 + 1) / 8)


def cost(op: Op) -> float:
    """Seconds by kind of operation and layer, all different."""
    layer = sum(map(ord, getattr(op, "layer", ""))) % 7 / 8
    kinds = {Forward: 1, Recompute: 1.5, Backward: 2.25, BackwardWeights: 0.75}
    return kinds[type(op)] + layer if type(op) in kinds else 0.0


def measured(rank: int, case: Case) -> tuple[dict[str, float], float, list[bool]]:
    """Also return whether a simulation of 1000 s is repeated after 50,000 s, and after 150,000 s."""
    engine = new_engine(rank, case)
    meter = BubbleMeter(engine.config, engine.mesh)
    programs = [program(stage, case.schedule, case.micro_batches).gradients for stage in meter.stages]
    timing = simulate(programs, cost)
    spans, again = spans_of(timing, engine.mesh.pp.rank), list[bool]()
    found = meter.measure(spans, simulates=rank == 0)
    for passed in (50_000, 150_000):
        meter._simulated_at, meter._simulation_took = time.perf_counter() - passed, 1000.0
        again.append("bubble_simulated" in meter.measure(spans, simulates=rank == 0))
    return found, timing.bubble, again


@pytest.mark.parametrize(
    "case",
    [
        Case(pp=2, dp=2, zero=3, recompute="full", micro_batches=3),
        Case(pp=3, micro_batches=4, schedule="zero-bubble"),
        Case(pp=2, micro_batches=4, schedule="interleaved", chunks=2),
    ],
    ids=str,
)
def test_stages_agree_and_the_simulation_has_every_stages_costs(case: Case, ranks) -> None:
    """Layers of different cost on every stage: each stage knows its own alone, and the simulation needs all."""
    for rank, (found, wanted, again) in enumerate(ranks(case.world).run(measured, case)):
        assert again == [False, rank == 0]  # a hundredth of the time is for simulations
        assert set(found) == {"bubble", "bubble_simulated"} if rank == 0 else {"bubble"}
        assert list(found.values()) == pytest.approx([wanted] * len(found), abs=1e-8)
