"""The whole product for pipelines: schedule x ZeRO stage x recompute x place of kept inputs x pp x micro-batches.

`tests.parallel.matrix` has every pair of levels; this has every combination of these. All of it is slow. Cases that
differ in the micro-batches alone go to the ranks in one call, on one mesh, since groups would take most of the time.
"""

import dataclasses
from typing import Any

import pytest
import torch

from megazero.engine.mesh.mesh import Mesh
from megazero.engine.plan.schedule.schedules import SCHEDULES
from megazero.planner.bytes.estimate import estimate
from tests.helpers.late import late_collectives
from tests.parallel.cases import MODEL, Case, Outcome, train_on
from tests.parallel.test_parity import TOLERANCE, expected, fp64, relative_error

pytestmark = pytest.mark.slow

FULL: dict[str, Any] = {"recompute": "full"}
WAYS: list[dict[str, Any]] = [{"recompute": "none"}, {"recompute": "selective"}, FULL, FULL | {"host": True}]
ORDERS = [
    (name, chunks)
    for name, schedule in SCHEDULES.items()
    for chunks in ((2,) if schedule.v_shaped else (2, 3) if schedule.virtual_stages else (1,))
]


STEPS = 2  # one with the initial weights, one with updated ones


def every_number_of_micro_batches(pp: int, chunks: int, case: Case) -> list[Case]:
    """M in {1, pp - 1, pp, 2 pp + 1}, with an odd number of layers, more than virtual stages."""
    model = dataclasses.replace(MODEL, num_layers=pp * chunks + 1 + (pp * chunks) % 2)
    case = fp64(case._replace(pp=pp, chunks=chunks, model=model))
    return [case._replace(micro_batches=m, batch=m * case.dp) for m in sorted({1, pp - 1, pp, 2 * pp + 1})]


def train_all(rank: int, cases: list[Case]) -> list[list[Outcome]]:
    """Train every case; where M = pp also without overlap, and with overlap and late collectives."""
    mesh = Mesh.build(cases[0].layout, rank, torch.device("cpu"))
    found = []
    for case in cases:
        on = dataclasses.replace(mesh, layout=case.layout)
        found.append([train_on(on, case, STEPS)])
        if case.micro_batches == case.pp:
            found[-1].append(train_on(on, case._replace(options=(("overlap_comm", False),)), STEPS))
            with late_collectives():
                found[-1].append(train_on(on, case, STEPS))
    return found


def check(cases: list[Case], ranks: Any) -> None:
    """Losses and norms against plain PyTorch; bytes as estimated; the same bits with and without overlap."""
    answers = ranks(cases[0].world).run(train_all, cases)
    for number, case in enumerate(cases):
        losses, norms = expected(case)
        for rank, (outcome, *others) in enumerate(answer[number] for answer in answers):
            assert relative_error(outcome.losses, losses[:STEPS]) < TOLERANCE, case
            assert relative_error(outcome.norms, norms[:STEPS]) < TOLERANCE, case
            memory, traffic = estimate(case.config(), case.layout, rank)
            assert (outcome.memory[-1], outcome.sent[-1]) == (memory, traffic), (rank, case)
            for other in others:
                assert (other.losses, other.norms, other.sent) == (outcome.losses, outcome.norms, outcome.sent), case


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())))
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize(("schedule", "chunks"), ORDERS)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_every_way_to_keep_activations_at_every_stage(
    pp: int, schedule: str, chunks: int, zero: int, way: dict[str, Any], ranks
) -> None:
    check(every_number_of_micro_batches(pp, chunks, Case(dp=2, zero=zero, schedule=schedule, **way)), ranks)


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize(("pp", "dp", "zero"), [(2, 1, 0), (3, 1, 0), (4, 1, 0), (2, 2, 1), (2, 2, 2), (2, 2, 3)])
@pytest.mark.parametrize(("schedule", "chunks"), ORDERS)
def test_inputs_kept_in_parts(pp: int, dp: int, zero: int, schedule: str, chunks: int, host: bool, ranks) -> None:
    case = Case(dp=dp, tp=2, zero=zero, schedule=schedule, recompute="full", pa=True, host=host)
    check(every_number_of_micro_batches(pp, chunks, case), ranks)
