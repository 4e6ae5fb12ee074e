"""Pipelines of real ranks: layers split unevenly, any number of micro-batches, every schedule."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megazero import checkpoint
from megazero.checkpoint.engine_state import EngineState
from megazero.engine.plan.schedule.schedules import SCHEDULES
from megazero.planner.bytes.estimate import estimate
from tests.helpers.families import of_family
from tests.helpers.rings import SECOND, by_default
from tests.parallel.cases import MODEL, Case, evaluate, micro_batches, new_engine, train
from tests.parallel.test_parity import TOLERANCE, expected, fp64, relative_error, train_late

UNTIED = replace(MODEL, untie_embeddings=True)
WORDY = replace(MODEL, vocab_size=1801)  # a head of 3 blocks: split by cost, the last stage has fewer layers
INTER: dict[str, Any] = {"schedule": "interleaved", "chunks": 2}


def uneven() -> list[Case]:
    found = [Case(pp=2, split="1,4", micro_batches=3), Case(pp=2, split="5,0", micro_batches=3, recompute="full")]
    found += [Case(pp=2, dp=2, split="0,5", zero=z, micro_batches=3) for z in (0, 3)]
    found += [Case(pp=4, split="0,2,3,0", micro_batches=2, model=UNTIED)]
    found += [Case(pp=2, split="0,2,3,0", micro_batches=4, recompute="full", **INTER)]
    found += [Case(pp=2, dp=2, split="2,0", zero=2, schedule="zero-bubble", model=replace(MODEL, num_layers=2))]
    found += [Case(pp=2, tp=2, model=WORDY, sp=True), Case(pp=3, model=WORDY, recompute="full", md=True)]
    return found


def every_number_of_micro_batches() -> list[Case]:
    """M in 1, pp - 1, pp, 2 pp + 1; with a layer or two more than the virtual stages."""
    found = []
    for pp in (2, 3, 4):
        for name, schedule in SCHEDULES.items():
            chunks = 2 if schedule.virtual_stages else 1
            model = replace(MODEL, num_layers=pp * chunks + 1)
            for m in sorted({1, pp - 1, pp, 2 * pp + 1}):
                found.append(Case(pp=pp, schedule=name, chunks=chunks, micro_batches=m, batch=m, model=model))
    return found


def every_policy() -> list[Case]:
    """Schedules with ZeRO's stages, recompute, and kept inputs cut over tp or on the host."""
    ways: list[dict[str, Any]] = [
        {"dp": 2, "zero": zero, "recompute": r} for zero in range(4) for r in ("none", "full")
    ]
    ways += [{"tp": 2, "recompute": "full", "pa": True, "host": host} for host in (False, True)]
    schedules: list[dict[str, Any]] = [
        {"schedule": name, "chunks": 2 if schedule.virtual_stages else 1} for name, schedule in SCHEDULES.items()
    ]
    return [Case(pp=2, micro_batches=3, **schedule, **way) for schedule in schedules for way in ways]


def queues() -> list[Case]:
    """Weight gradients that wait: all that they keep is counted. Waiting on rank 1 and, unbounded, more on rank 2."""
    zb: dict[str, Any] = {"schedule": "zero-bubble", "micro_batches": 4}
    found = [Case(pp=3, **zb, backlog=b, recompute=r) for b, r in ((0, "full"), (1, "none"), (1, "selective"))]
    found += [Case(pp=2, tp=2, **zb, batch=8, sp=sp, recompute=r) for sp, r in ((False, "full"), (True, "selective"))]
    return [*found, Case(pp=2, **zb, model=replace(MODEL, hidden_dropout=0.1, untie_embeddings=True))]


def only(cases: list[Case], *names: str) -> list[Any]:
    """All cases, of which the named ones are in the second ring, and the first in the default suite."""
    rings = {name: SECOND if number else () for number, name in enumerate(names)}
    assert set(rings) <= set(map(str, cases))
    return [pytest.param(case, marks=rings.get(str(case), pytest.mark.slow), id=str(case)) for case in cases]


COUNTS = [  # fewer micro-batches than stages, and more than twice as many
    "pp3-dp1-tp1-zero0-M7-1f1b-batch7-num_layers=4",
    "pp4-dp1-tp1-zero0-M3-interleaved-v2-batch3-num_layers=9",
    "pp3-dp1-tp1-zero0-M2-zero-bubble-batch2-num_layers=4",
    "pp2-dp1-tp1-zero0-M1-zero-bubble-v-v2-batch1",
    "pp3-dp1-tp1-zero0-M7-zero-bubble-v-v2-batch7-num_layers=7",
]
POLICIES = [
    "pp2-dp2-tp1-zero0-M3-interleaved-v2-recompute",
    "pp2-dp2-tp1-zero2-M3-zero-bubble-recompute",
    "pp2-dp2-tp1-zero1-M3-zero-bubble-v-v2",
    "pp2-dp1-tp2-zero0-M3-zero-bubble-v-v2-recompute-pa-host",
]


@pytest.mark.parametrize(
    "case",
    by_default(uneven() + queues(), *(0, 4, 8, 10))
    + only(every_number_of_micro_batches(), *COUNTS)
    + only(every_policy(), *POLICIES),
    ids=str,
)
def test_every_pipeline_is_the_same_model(case: Case, ranks) -> None:
    """Losses and norms against plain PyTorch in fp64; bytes of every rank, to the byte, as estimated."""
    losses, norms = expected(case)
    case = fp64(case)
    for rank, outcome in enumerate(ranks(case.world).run(train, case)):
        assert relative_error(outcome.losses, losses) < TOLERANCE
        assert relative_error(outcome.norms, norms) < TOLERANCE
        memory, traffic = estimate(case.config(), case.layout, rank)
        assert outcome.memory[-1] == memory and outcome.sent[-1] == traffic


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("m", [1, 3])
def test_an_evaluation_takes_any_number_of_micro_batches(m: int, chunks: int, ranks) -> None:
    case = fp64(Case(pp=2, micro_batches=m, batch=3, schedule="interleaved" if chunks > 1 else "1f1b", chunks=chunks))
    ((wanted, targets),) = ranks(1).run(evaluate, fp64(Case(batch=3, micro_batches=1)))
    for loss, count in ranks(2).run(evaluate, case):
        assert relative_error([loss], [wanted]) < TOLERANCE and count == targets


@pytest.mark.second
@pytest.mark.parametrize(
    "case",
    [
        Case(pp=2, dp=2, zero=2, micro_batches=3, schedule="zero-bubble"),
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in (
                Case(pp=2, dp=2, zero=3, micro_batches=3, recompute="full", **INTER),
                Case(pp=2, dp=2, zero=1, micro_batches=3, split="4,1", recompute="full"),
            )
        ),
    ],
    ids=str,
)
def test_overlap_changes_no_bit_of_a_pipeline(case: Case, ranks) -> None:
    """Nor do late collectives: see tests/helpers/late.py."""
    off = case._replace(options=(("overlap_comm", False),))
    wanted = [(o.losses, o.norms, o.sent) for o in ranks(case.world).run(train, off)]
    for function in (train, train_late):
        assert [(o.losses, o.norms, o.sent) for o in ranks(case.world).run(function, case)] == wanted


def test_the_cases_are_split_by_cost() -> None:
    found = [Case(pp=2, model=WORDY), Case(pp=3, model=WORDY, recompute="full"), Case(pp=2)]
    assert [case.layout.split for case in found] == [(4, 1), (2, 3, 0), ()]


def train_and_save(rank: int, case: Case, folder: Path) -> float:
    """A step, a checkpoint, and the loss of the step after it."""
    engine = new_engine(rank, case)
    engine.train_step(1, micro_batches(case, engine.mesh, 0))
    engine.wait()
    checkpoint.save(folder, 1, EngineState(engine).shards(), EngineState(engine).numbers(), engine.mesh.host.group)
    return engine.train_step(2, micro_batches(case, engine.mesh, 1)).loss


def load_and_train(rank: int, case: Case, path: Path) -> float:
    engine = new_engine(rank, case)
    engine.wait()
    shards = EngineState(engine).shards()
    checkpoint.load(path, shards, engine.mesh.host.group)
    EngineState(engine).load(checkpoint.read_state(path), shards)
    return engine.train_step(2, micro_batches(case, engine.mesh, 1)).loss


def test_any_split_loads_what_another_saved(tmp_path: Path, ranks) -> None:
    cases = [fp64(Case(pp=2, split=split, micro_batches=4)) for split in ("", "5,0")]
    cases.append(fp64(Case(pp=2, split="0,3,1,1", micro_batches=4, **INTER)))
    found, wanted = losses_after_loading(cases, tmp_path, ranks)
    assert relative_error(found, wanted) < TOLERANCE


def losses_after_loading(cases: list[Case], folder: Path, ranks: Any) -> tuple[list[float], list[float]]:
    """Return the losses of each case on each rank after it loaded the previous case's checkpoint, and the saver's."""
    found, wanted = [], []
    for number, (saved, case) in enumerate(zip(cases, cases[1:] + cases[:1], strict=True)):
        root = folder / str(number)
        went_on = ranks(2).run(train_and_save, saved, root)
        loaded = ranks(2).run(load_and_train, case, checkpoint.find(root))
        found += loaded
        wanted += went_on[:1] * len(loaded)
    return found, wanted


ONE_GROUP = replace(MODEL, num_layers=2, **of_family("llama"), num_query_groups=1, untie_embeddings=True)


@pytest.mark.second
def test_any_layout_of_a_llama_loads_what_another_saved(tmp_path: Path, ranks) -> None:
    """Its one group of keys and values is replicated over tp, whose ranks all own it."""
    cases = [fp64(Case(model=ONE_GROUP, **how)) for how in ({"tp": 2}, {"dp": 2, "zero": 3}, {"pp": 2})]
    found, wanted = losses_after_loading(cases, tmp_path, ranks)
    assert relative_error(found, wanted) < TOLERANCE
