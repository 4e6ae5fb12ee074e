"""Real ranks compute in the simulated order: the benchmark of bubbles, without sleeps and without times."""

import re

import pytest
import torch

from megazero.engine.plan.program.operations import name_of
from megazero.engine.plan.schedule.schedules import SCHEDULES
from tests.helpers.asleep import Work, asleep


def computed(rank: int, work: Work) -> list[tuple[str, float, float]]:
    """(operation, begin, end) of a rank's computations in a step."""
    training = asleep(work, torch.device("cpu"))
    training.step(*work.inputs(0, rank, torch.device("cpu")))
    training.wait_for_all()
    return training.check()["spans"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_real_ranks_compute_in_the_simulated_order(schedule: str, ranks) -> None:
    """Each rank its computations in order; and no block before the one whose result it needs has ended."""
    work = Work(schedule, 3, 4, 0.0)
    found = ranks(3).run(computed, work)
    wanted = [[name_of(span.op) for span in spans if "blocks" in span.op.layer] for spans in work.simulated().spans]
    assert [[name for name, _, _ in spans] for spans in found] == wanted
    times = {}
    for name, begin, end in (span for spans in found for span in spans):
        kind, layer, i = re.match(r"(\w+) blocks\.(\d+) mb (\d+)", name).groups()
        times[kind, int(layer), int(i)] = begin, end
    layers = max(layer for _, layer, _ in times) + 1
    for (kind, layer, i), (begin, _) in times.items():
        if kind == "Forward" and layer > 0:
            assert times["Forward", layer - 1, i][1] <= begin
        elif kind == "Backward":
            needed = ("Backward", layer + 1, i) if layer + 1 < layers else ("Forward", layer, i)
            assert times[needed][1] <= begin
