"""Statistics per layer (--stats-interval): values of plain PyTorch in every layout, and no effect on the step.

The parity matrix has them as a factor; cases here are those of which each shows another fault.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from megazero.checkpoint.engine_state import EngineState
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.topology import Layout
from megazero.flags.config import Config, LogConfig, ParallelConfig
from megazero.flags.resolve import resolve
from megazero.observe import largest_logit
from megazero.observe.layer_statistics import KEYS, LayerStatistics
from megazero.planner.bytes.estimate import estimate
from megazero.planner.trace.pretend import pretend_mesh
from tests.helpers.families import of_family
from tests.helpers.rings import SECOND
from tests.helpers.table import for_each
from tests.parallel.cases import MODEL, Case, micro_batches, new_engine, train
from tests.parallel.runs import configured, quietly, run_of, write_corpus
from tests.parallel.test_parity import check_layers, fp64

RATIO = "layer_update_ratio"


TWO = replace(MODEL, num_layers=2)
LLAMA = replace(TWO, **of_family("llama"), num_query_groups=2, window_size=4, layer_pattern="LG")
EXPERTS = replace(TWO, **of_family("mixtral"), num_query_groups=2, num_experts=4, moe_ffn_hidden_size=24)


@pytest.mark.parametrize(
    "case",
    [
        Case(pp=2, model=TWO),  # whose table is on both stages
        Case(tp=2, sp=True, model=TWO),
        Case(dp=2, model=TWO, batch=7, micro_batch_size=2),  # a rank has a sample of padding
        Case(cp=2, zero=3, model=LLAMA, reset="attention"),
        Case(dp=2, ep=2, zero=1, model=EXPERTS),
    ],
    ids=str,
)
def test_layers_have_the_statistics_of_plain_pytorch(case: Case, ranks) -> None:
    case = fp64(case)._replace(stats=True)
    check_layers(case, ranks(2).run(train, case))


@for_each(("shards", "norm_axis", "adds"), [(0, "", [0, 1]), (0, "data", range(12)), (3, "shard", range(6))])
def test_one_copy_of_a_weight_adds_its_squares(shards: int, norm_axis: str, adds: Sequence[int]) -> None:
    """Two tensor-parallel parts; dp 2 x cp 3 ranks hold the same weights, shares of them, or copies of shares."""
    layout = Layout(dp=2, cp=3, tp=2, shards=shards)
    group = SimpleNamespace(norm_axis=norm_axis, axis="shard", replica_axis="replica")
    unit: Any = SimpleNamespace(name="blocks.0", flat=SimpleNamespace(group=group))
    meshes = [pretend_mesh(layout, rank, torch.device("cpu"), needs_staging_buffer=True) for rank in range(12)]
    layers = SimpleNamespace(layers=SimpleNamespace(tied=""))
    of: Any = [SimpleNamespace(engine=layers, mesh=mesh) for mesh in meshes]
    assert [rank for rank in range(12) if LayerStatistics._is_first_copy(of[rank], unit)] == [*adds]


class Trained(NamedTuple):
    """Results of two steps, and of a third one without targets."""

    results: list[tuple[float, float]]
    weights: dict[str, torch.Tensor]
    skipped: dict[str, dict[str, float]]


def trained(rank: int, case: Case) -> Trained:
    engine, results, found = new_engine(rank, case), [], {}
    statistics = LayerStatistics(engine)
    for step in range(3):
        batches = micro_batches(case, engine.mesh, step)
        if step == 2:
            batches = [each._replace(loss_mask=torch.zeros_like(each.loss_mask)) for each in batches]
        if case.stats:
            statistics.begin()
        result = engine.train_step(step + 1, batches)
        if case.stats:
            found = statistics.end(result.grad_norm)
        assert result.skipped == (step == 2)
        results.append((result.loss, result.grad_norm))
    engine.wait()
    return Trained(
        results[:2], {name: shard.data.clone() for name, shard in EngineState(engine).shards().items()}, found
    )


@pytest.mark.parametrize(
    "case",
    [Case(dp=2, zero=3, precision="bf16"), pytest.param(Case(tp=2, sp=True, recompute="full"), marks=SECOND)],
    ids=str,
)
def test_a_step_with_statistics_is_the_same_step_bit_for_bit(case: Case, ranks) -> None:
    """Losses, norms, master weights and moments. A skipped step has no update."""
    plain, observed = (ranks(2).run(trained, case._replace(stats=stats)) for stats in (False, True))
    for before, after in zip(plain, observed, strict=True):
        assert before.results == after.results
        assert before.weights.keys() == after.weights.keys()
        assert all(torch.equal(data, after.weights[name]) for name, data in before.weights.items())
        assert set(after.skipped) == {*KEYS} - {RATIO} and set(after.skipped[KEYS[0]].values()) == {0.0}


def logits(rank: int, case: Case, rows: int) -> dict[str, float]:
    """The largest logits of a step, computed from `rows` queries at a time."""
    engine = new_engine(rank, case)
    statistics = LayerStatistics(engine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(largest_logit, "block_rows", lambda heads, keys: rows)
        statistics.begin()
        engine.train_step(1, micro_batches(case, engine.mesh, 0))
    return statistics.end(1.0)["layer_max_logit"]


def test_blocks_of_queries_have_the_largest_logit_of_all(ranks) -> None:
    """11 queries in blocks of 3, with a window, and of documents; to rounding, because products differ in shape."""
    case = Case(model=LLAMA, precision="fp64", reset="attention", stats=True)
    [whole], [blocks] = (ranks(1).run(logits, case, rows) for rows in (11, 3))
    assert list(whole) == ["blocks.0", "blocks.1"]
    assert all(abs(blocks[name] / value - 1) < 1e-12 for name, value in whole.items())


def logged(rank: int, config: Config) -> None:
    assert quietly(run_of(rank, 2, config)) is None


def test_a_run_has_statistics_every_few_iterations_besides_other_observers(ranks, tmp_path: Path) -> None:
    """Every second of four, on two stages whose bubble is measured at the same time. Bytes are the estimated ones."""
    log = LogConfig(log_dir=str(tmp_path / "log"), stats_interval=2, report=False)
    config = configured(write_corpus(tmp_path / "corpus"), "", 4)
    config = replace(config, log=log, parallel=ParallelConfig(pipeline_model_parallel_size=2))
    ranks(2).run(logged, config)
    records = [json.loads(line) for line in (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()]
    layers = ["token_embedding", "position_embedding", "blocks.0", "blocks.1", "head"]
    for record in records:
        observed = record["iteration"] % 2 == 0
        assert all((key in record) == observed for key in KEYS) and "bubble" in record
        log = replace(config.log, stats_interval=int(observed))
        resolved, layout = resolve(replace(config, log=log), 2, 257, declare)
        wanted = estimate(resolved, layout)
        assert (record["memory_bytes"], record["traffic_bytes"]) == (wanted.memory, wanted.traffic)
        if observed:
            assert [list(record[key]) for key in KEYS] == [layers, layers, layers[:4], layers[2:4]]
            squares = sum(norm**2 for norm in record["layer_grad_norm"].values())
            assert abs(squares / record["grad_norm"] ** 2 - 1) < 1e-12
    assert sum("layer_grad_norm" in record for record in records) == 2
