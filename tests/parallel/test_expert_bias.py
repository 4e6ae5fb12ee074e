"""Biases that balance experts: the same in every layout, also of a run that stops and resumes in another one."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from megazero import checkpoint
from megazero.checkpoint.engine_state import EngineState, load_biases
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.step.engine import Engine
from megazero.generation.generate import NewTokens
from megazero.generation.model import InferenceModel
from megazero.observe.step_metrics import expert_loads
from megazero.run.text_samples import next_logits
from tests.helpers import chains
from tests.helpers.families import of_family
from tests.helpers.rings import by_default
from tests.parallel.cases import MODEL, Case, micro_batches, new_engine

RATE = 0.05
EXPERTS = replace(
    MODEL,
    num_layers=3,
    **of_family("mixtral"),
    ffn_hidden_size=36,
    num_query_groups=2,
    num_experts=6,
    moe_router_topk=2,
    moe_layer_freq="EDE",
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_bias_update_rate=RATE,
    moe_router_num_groups=3,
    moe_router_group_topk=2,
    moe_router_topk_scaling_factor=2.5,
    moe_aux_loss_coeff=0.1,
    moe_z_loss_coeff=0.01,
)
STOP, END = 2, 5
TOLERANCE = 1e-10
ONE = Case(precision="fp64", model=EXPERTS, batch=12, micro_batches=1)
LAYOUTS = [
    ONE._replace(tp=2, sp=True, ep=2, etp=1, zero=1, micro_batches=2, recompute="full"),
    ONE._replace(tp=2, sp=True, recompute="full", micro_batches=2, zero=1),
    ONE._replace(pp=2, micro_batches=4, schedule="zero-bubble"),
    ONE._replace(dp=2, zero=3, micro_batches=2, recompute="full"),
    ONE._replace(cp=2, zero=2, micro_batches=3, recompute="selective"),
]


class Found(NamedTuple):
    """The steps of a rank."""

    losses: list[float]
    norms: list[float]
    choices: list[tuple[tuple[int, ...], ...]]  # of experts, by layer
    biases: list[dict[str, list[float]]]  # after each step


def steps(engine: Engine, case: Case, first: int, last: int) -> Found:
    found = Found([], [], [], [])
    for step in range(first, last):
        result = engine.train_step(step + 1, micro_batches(case, engine.mesh, step), case.batch)
        loads = expert_loads(result, case.model)
        assert loads is not None
        found.losses.append(result.loss)
        found.norms.append(result.grad_norm)
        found.choices.append(loads.choices)
        found.biases.append(EngineState(engine).numbers()["expert_biases"])
    return found


def train(rank: int, case: Case) -> Found:
    return steps(new_engine(rank, case), case, 0, END)


def train_and_save(rank: int, case: Case, folder: Path) -> Found:
    engine = new_engine(rank, case)
    found = steps(engine, case, 0, STOP)
    engine.wait()
    checkpoint.save(folder, STOP, EngineState(engine).shards(), EngineState(engine).numbers(), engine.mesh.host.group)
    return found


def resume(rank: int, case: Case, path: Path) -> Found:
    engine = new_engine(rank, case)
    engine.wait()
    shards = EngineState(engine).shards()
    checkpoint.load(path, shards, engine.mesh.host.group)
    EngineState(engine).load(checkpoint.read_state(path), shards)
    return steps(engine, case, STOP, END)


def close(found: list[float], wanted: list[float]) -> bool:
    return all(abs(a - b) < TOLERANCE * abs(b) for a, b in zip(found, wanted, strict=True))


@pytest.fixture(scope="module")
def alone(ranks) -> Found:
    """One process that never stops."""
    (found,) = ranks(1).run(train, ONE)
    return found


def test_biases_follow_the_loads_of_the_global_batch(alone: Found) -> None:
    """b_i += rate * sign(mean - load_i), in every layer with experts and in no other; they change later choices."""
    biases = {"0": [0.0] * 6, "2": [0.0] * 6}
    for choices, after in zip(alone.choices, alone.biases, strict=True):
        for loads, of_layer in zip(choices, biases.values(), strict=True):
            assert sum(loads) == 2 * 11 * 12
            for i, load in enumerate(loads):
                of_layer[i] += RATE * ((load < sum(loads) / 6) - (load > sum(loads) / 6))
        assert after == biases


def imbalance(choices: tuple[tuple[int, ...], ...]) -> float:
    return max(max(loads) / sum(loads) * len(loads) for loads in choices)


def train_skewed(rank: int, case: Case) -> list[float]:
    """Return the imbalance of each step over samples of few words."""
    engine, found = new_engine(rank, case), []
    for step in range(24):
        [batch] = micro_batches(case, engine.mesh, 0)
        result = engine.train_step(step + 1, [batch._replace(ids=batch.ids % 16)], case.batch)
        loads = expert_loads(result, case.model)
        assert loads is not None
        found.append(imbalance(loads.choices))
    return found


def test_biases_balance_the_experts_of_skewed_data(ranks) -> None:
    """Only the head learns. The largest load becomes 1.2 of the mean at most, and without biases stays above 1.4."""
    free = replace(EXPERTS, moe_router_num_groups=0, moe_router_group_topk=0, moe_aux_loss_coeff=0.0)
    fixed = ONE._replace(frozen=("blocks.*", "token_embedding.*"))
    cases = [fixed._replace(model=replace(free, moe_router_bias_update_rate=rate)) for rate in (0.004, 0.0)]
    (found,), (without,) = (ranks(1).run(train_skewed, case) for case in cases)
    assert found[0] == without[0]
    assert max(found[-4:]) < 1.2 and min(without[-4:]) > 1.4


@pytest.mark.second
@pytest.mark.parametrize("case", by_default(LAYOUTS, len(LAYOUTS) - 1), ids=str)
def test_every_layout_has_the_same_biases(case: Case, alone: Found, ranks) -> None:
    for found in ranks(case.world).run(train, case):
        assert found.choices == alone.choices and found.biases == alone.biases
        assert close(found.losses, alone.losses) and close(found.norms, alone.norms)


@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, len(LAYOUTS)))])
def test_a_run_resumes_in_another_layout(number: int, alone: Found, tmp_path: Path, ranks) -> None:
    first, second = LAYOUTS[number], LAYOUTS[(number + 1) % len(LAYOUTS)]
    ranks(first.world).run(train_and_save, first, tmp_path)
    for found in ranks(second.world).run(resume, second, checkpoint.find(tmp_path)):
        assert found.choices == alone.choices[STOP:] and found.biases == alone.biases[STOP:]
        assert close(found.losses, alone.losses[STOP:]) and close(found.norms, alone.norms[STOP:])


def test_a_skipped_step_changes_no_bias() -> None:
    case = ONE._replace(precision="fp16")
    engine = new_engine(0, case)
    assert engine.scale is not None
    engine.scale = replace(engine.scale, value=1e30)
    before = EngineState(engine).numbers()["expert_biases"]
    result = engine.train_step(1, micro_batches(case, engine.mesh, 0), case.batch)
    loads = expert_loads(result, case.model)
    assert result.skipped and loads is not None and imbalance(loads.choices) > 1
    assert EngineState(engine).numbers()["expert_biases"] == before


@pytest.mark.second
def test_a_stopped_run_keeps_its_biases(tmp_path: Path, ranks) -> None:
    """A run of `pretrain_gpt.py` is resumed by its checkpoints, from a pipeline to tensor parallelism."""
    corpus, model = chains.make_corpus(tmp_path), replace(EXPERTS, seq_length=8, vocab_size=257)

    def run(name: str, end: int, **folders: str) -> chains.Curve:
        config = replace(chains.configured(name, corpus, end, "fp64", **folders), model=model)
        world = chains.LAYOUTS[name][0]
        curves = ranks(world).run(chains.train, world, config)
        return curves[0]

    whole, save = run("alone", END), str(tmp_path / "stopped")
    run("pp2", STOP, save=save)
    assert chains.deviation(run("tp2 sp", END, load=save), whole) < TOLERANCE * 6


def test_evaluation_and_generation_use_the_biases(tmp_path: Path) -> None:
    """The logits of a checkpoint are those of the engine that saved it; without biases both are far off."""
    engine = new_engine(0, ONE)
    steps(engine, ONE, 0, STOP)
    path = checkpoint.save(tmp_path, STOP, EngineState(engine).shards(), EngineState(engine).numbers(), None)
    [batch] = micro_batches(ONE._replace(batch=2), engine.mesh, 7)
    places = [10, 6]
    wanted, loss = next_logits(engine, batch, places), engine.evaluate([batch])[0]
    inference = InferenceModel(path, EXPERTS, Mesh.build(Layout(), 0, torch.device("cpu")), "fp64")
    new = [NewTokens(row[: place + 1], 0) for row, place in zip(batch.ids.tolist(), places, strict=True)]
    found = inference.logits(new, inference.new_cache(2, 11))
    assert found is not None and wanted is not None
    assert (found - wanted).abs().max() < TOLERANCE
    load_biases(engine.routers, {})
    unbiased = next_logits(engine, batch, places)
    assert unbiased is not None and (unbiased - wanted).abs().max() > 1e-3
    assert abs(engine.evaluate([batch])[0] - loss) > 1e-3
