"""The table that a run prints at its start."""

import re
from dataclasses import replace

from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.topology import Layout
from megazero.flags.cli import parse
from megazero.flags.config import ActivationConfig, Config, ModelConfig, ParallelConfig, TrainingConfig, ZeroConfig
from megazero.flags.resolve import resolve
from megazero.planner.bytes.bytes_report import bytes_table, partition_line, queue_line, report_rows
from megazero.planner.bytes.estimate import stage_bytes
from tests.helpers.families import of_family
from tests.helpers.table import for_each
from tests.helpers.traces import trace_layers

FULL = ActivationConfig("full")
PA = replace(FULL, partition_activations=True)


def resolved(activations: ActivationConfig, **parallel: object) -> tuple[Config, Layout]:
    config = Config(
        model=ModelConfig(5, 64, 256, 4, 16, 101),
        training=TrainingConfig(micro_batch_size=3, global_batch_size=6, precision="bf16"),
        parallel=ParallelConfig(tensor_model_parallel_size=2, **parallel),  # type: ignore[arg-type]
        activations=activations,
    )
    return resolve(config, 2, 0, declare)


def rows(activations: ActivationConfig, **parallel: object) -> dict[str, int]:
    return {row.kind: row.num_bytes for row in report_rows(*resolved(activations, **parallel))}


def test_pa_reports_the_bytes_that_it_saves_and_sends() -> None:
    """b s h of 16 bit a block: half is saved at tp 2, and half is sent; two micro-batches."""
    block = 3 * 16 * 64 * 2
    line = partition_line(*resolved(PA))
    assert f"saves {5 * block // 2:,} bytes of this rank's memory" in line
    assert f"adds {2 * 5 * block // 2:,} bytes" in line
    assert line.endswith(
        f" bytes to its tp traffic of an iteration ({2 * 5 * block // 2 / rows(FULL)['tp traffic']:.1%})"
    )
    assert line in bytes_table(*resolved(PA))
    assert partition_line(*resolved(FULL)) == ""


def test_pa_on_the_host_saves_host_memory() -> None:
    line = partition_line(*resolved(replace(PA, checkpoint_in_cpu=True)))
    assert f"saves {5 * 3 * 16 * 64:,} bytes of this rank's host memory" in line


def test_formulas_name_the_axes_that_divide() -> None:
    """tp 2, cp 3, pp 4, dp 5: states are divided by 15 ranks, kept inputs by cp and tp."""
    flags = (
        "--num-layers 8 --hidden-size 96 --num-attention-heads 12 --seq-length 90 --vocab-size 330 --precision bf16 "
        "--grad-dtype fp32 --global-batch-size 40 --tensor-model-parallel-size 2 --context-parallel-size 3 "
        "--pipeline-model-parallel-size 4 --zero-stage 2 --recompute full --partition-activations --loss-chunk-tokens 0"
    )
    found = {row.kind: row.formula for row in report_rows(*resolve(parse(flags.split()), 120, 0, declare))}
    wanted = {
        "parameters": "2 Psi",
        "optimizer": "12 Psi / 15",
        "gradients": "4 Psi / 15",
        "activation_checkpoints": "2 b s / 3 h / 2 for each block and micro-batch in flight",
        "logits": "2 b s / 3 v / tp",
    }
    assert {kind: found[kind] for kind in wanted} == wanted


def test_where_checkpoints_lie() -> None:
    block = 3 * 16 * 64 * 2
    assert rows(FULL)["activation_checkpoints"] == 5 * block and rows(FULL)["host"] == 0
    assert rows(PA)["activation_checkpoints"] == 5 * block // 2
    assert rows(FULL, sequence_parallel=True)["activation_checkpoints"] == 5 * block // 2
    host = rows(replace(PA, checkpoint_in_cpu=True))
    assert host["activation_checkpoints"] == 0 and host["host"] == 5 * block // 2


def test_activations_are_those_of_what_is_in_flight() -> None:
    """Without recompute, of every layer and micro-batch held; with it, of the one block that is computed again.

    And of the ends: the embeddings keep as much in any case; the head keeps its input's gradient.
    """
    none = resolved(ActivationConfig())
    traced = trace_layers(*none, 0)
    block, head = traced["blocks.0"], traced["head"]
    saved = sum(block.saved) + block.saved_input
    ends = sum(traced[name].kept(True) for name in ("token_embedding", "position_embedding", "head"))
    assert head.kept(True) == 3 * 16 * 64 * 2
    assert rows(ActivationConfig())["activations"] == 5 * saved + ends
    hidden = 3 * 16 * 64 * 2  # its input is the kept one, unless Pa has gathered it
    assert rows(FULL)["activations"] == saved - hidden + ends - head.kept(True)
    assert rows(PA)["activations"] == saved + ends - head.kept(True)
    config = replace(none[0], parallel=replace(none[0].parallel, pipeline_schedule="gpipe"))
    found = {row.kind: row.num_bytes for row in report_rows(config, none[1])}
    assert found["activations"] == 2 * rows(ActivationConfig())["activations"]


def value(formula: str, names: dict[str, int]) -> float:
    """Evaluate a printed formula, such as "(2 x 4 + 2) Psi / 4": numbers and names side by side are multiplied."""
    words = re.findall(r"\d+|[A-Za-z]+|[()+\-/]", re.sub(r"\bx\b", " ", formula))
    text = ""
    for before, word in zip(["(", *words], words, strict=False):
        text += ("" if before in "(+-/" or word in ")+-/" else "*") + str(names.get(word, word))
    return eval(text, {"__builtins__": {}})


WAYS = [(0, 0, False)]  # of ZeRO: stage, --zero-shard-size, gradients and weights once a step
WAYS += [(zero, shards, once) for zero in (1, 2, 3) for shards in (0, 2) for once in (False, True)[: 1 + (zero > 1)]]


@for_each("precision", ["fp32", "bf16"])
@for_each("zero, shards, once", WAYS)
def test_formulas_come_to_the_bytes_beside_them(zero: int, shards: int, once: bool, precision: str) -> None:
    """Whoever computes a printed formula gets the printed number: dp 4, three micro-batches of five samples, tp 2."""
    every = {"zero_reduce_every": "step"} | ({"zero_gather_every": "step"} if zero == 3 else {})
    config = Config(
        model=ModelConfig(5, 64, 256, 4, 16, 101),
        training=TrainingConfig(5, 60, precision=precision, grad_dtype=precision),  # type: ignore[arg-type]
        parallel=ParallelConfig(tensor_model_parallel_size=2),
        zero=ZeroConfig(zero, zero_shard_size=shards, **every if once else {}),  # type: ignore[arg-type]
        activations=replace(FULL, loss_chunk_tokens=13 * once),
    )
    config, layout = resolve(config, 8, 0, declare)
    names = {
        "Psi": stage_bytes(config, layout, 0, "cpu").numel,
        "N": shards or 4,
        "b": 5,
        "s": 16,
        "h": 64,
        "v": 128,
        "tp": 2,
    }
    found = {row.kind: row for row in report_rows(config, layout)}
    for kind in ("parameters", "optimizer", "gradients", "logits"):
        assert value(found[kind].formula, names) == found[kind].num_bytes, kind
    kept = found["activation_checkpoints"]
    formula, tail = kept.formula.split(" for each ")
    assert tail == "block and micro-batch in flight"
    assert 5 * value(formula, names) == kept.num_bytes
    sent = found["dp traffic"]
    formula, _, where = sent.formula.partition(", N = ")
    shared, _, replicas = where.partition(" + ")
    assert int(shared) == names["N"]
    wanted = value(formula.replace("up to", ""), names) + (value(replicas, names) if replicas else 0)
    if "up to" in formula:  # tables are gathered less often than blocks
        assert 0.8 * wanted < sent.num_bytes < wanted
    else:
        assert abs(sent.num_bytes - wanted) < 100  # each collective's bytes are rounded down


@for_each("backlog", [0, 1])
def test_a_queue_of_weight_gradients_is_reported_and_with_full_recompute_warned_of(backlog: int) -> None:
    """Per block and micro-batch: inputs and output gradients of four products, 16 b s h at f = 4h, and 13 h of vectors.

    The last of 4 ranks, with 3 blocks, puts off 3 micro-batches, and holds a fourth while it computes the first.
    """
    model = ModelConfig(12, 64, 0, 4, 16, 101)
    parallel = ParallelConfig(
        pipeline_model_parallel_size=4, pipeline_schedule="zero-bubble", zero_bubble_backlog=backlog
    )
    for recompute in ("none", "full"):
        config = Config(model, TrainingConfig(2, 16), parallel=parallel, activations=ActivationConfig(recompute))
        line = queue_line(*resolve(config, 4, 0, declare))
        block = 4 * ((1 + 3 + 1 + 1 + 1 + 4 + 4 + 1) * 32 * 64 + (3 + 1 + 4 + 1 + 4) * 64)
        assert f"up to {3 * (4 if backlog == 0 else 2) * block:,} bytes" in line
        assert line.startswith("warning: ") == (recompute == "full")
        assert ("--zero-bubble-backlog 1" in line) == (recompute == "full")
    plain = replace(config, parallel=replace(parallel, pipeline_schedule="1f1b", zero_bubble_backlog=0))
    assert queue_line(*resolve(plain, 4, 0, declare)) == ""


def test_the_ranks_of_a_formula_are_those_of_its_group() -> None:
    """dp 12 x cp 2 in 3 copies of 8 ranks; of the 16 ranks of a copy with tp 2, 2 share each part of an expert."""
    config = Config(
        model=ModelConfig(2, 64, 256, 4, 16, 101, **of_family("mixtral"), num_experts=4),
        training=TrainingConfig(micro_batch_size=1, global_batch_size=12),
        parallel=ParallelConfig(
            tensor_model_parallel_size=2, context_parallel_size=2, expert_model_parallel_size=4, sequence_parallel=True
        ),
        zero=ZeroConfig(zero_stage=1, zero_shard_size=8),
    )
    (row,) = (row for row in report_rows(*resolve(config, 48, 0, declare)) if row.kind == "dp traffic")
    assert row.formula == "(4 + 4) Psi x (N-1)/N, N = 8 (experts: 2) + 2 x 4 Psi / 8 x (3-1)/3"
