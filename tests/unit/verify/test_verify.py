"""`megazero verify` without ranks: runs are shrunk to the same shape, and bad input is refused in a sentence."""

import math
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megazero.engine.model.stage import declare
from megazero.engine.options.optimizers import WeightKind
from megazero.families.parts.model_types import attention_kinds
from megazero.flags.batch_ramp import batch_sizes, padding_samples
from megazero.flags.cli import parse
from megazero.flags.flag_names import with_values
from megazero.flags.presets import preset_names
from megazero.flags.resolve import resolve
from megazero.planner.layouts import layout_words
from megazero.verify import planned
from megazero.verify.command import main, show_proof, verdict_of
from megazero.verify.compare import Comparison, Difference, Row, Whole, row
from megazero.verify.planned import UNBALANCED, unplanned
from megazero.verify.shrink import MOST_RANKS, small_layout
from megazero.verify.tolerance import Tolerance, terms
from megazero.verify.training import Sums, TensorPart, Trained, VerifiedStep, joined
from megazero.verify.verification import Proof, Wanted, make_runs, to_json
from tests.helpers.rings import by_default
from tests.helpers.table import for_each

TP, PP, CP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"
ETP = "--expert-tensor-parallel-size"


def shrunk(flags: str, world: int = 0, then: str = ""):
    runs, (config, layout) = make_runs(Wanted(flags.split(), world, then=then), "fp64")
    return runs, config, layout


NAMES = [each for each in preset_names() if each != "quickstart"]
DEFAULT = [NAMES.index(each) for each in ("zero-100b", "llama-3.1-8b-128k", "qwen3-30b-a3b", "gemma3-1b")]


@pytest.mark.parametrize("name", by_default(NAMES, *DEFAULT))
def test_every_preset_keeps_its_shape(name: str) -> None:
    """Each axis, and each choice of the model, is one before and after, or more than one before and after."""
    runs, before, real = shrunk(f"--preset {name} --vocab-size 50257")
    (after, layout), model = runs.layout, before.model
    assert {axis: size > 1 for axis, size in real.sizes.items()} == {axis: n > 1 for axis, n in layout.sizes.items()}
    assert layout.world_size <= max(MOST_RANKS, 16)
    assert set(attention_kinds(after.model)) == set(attention_kinds(model))
    kinds = [{each.has_experts(n) for n in range(each.num_layers)} for each in (model, after.model)]
    assert kinds[0] == kinds[1]
    for each in (lambda m: m.query_groups > 1, lambda m: m.query_groups == m.num_attention_heads,
                 lambda m: m.moe_router_topk < m.num_experts, lambda m: 0 < m.window_size < m.seq_length,
                 lambda m: m.num_attention_heads * m.head_dim == m.hidden_size, lambda m: m.rotary_dim == m.head_dim,
                 lambda m: m.vocab_size % real.tp == 0 or real.tp == 1):  # fmt: skip
        assert each(model) == each(after.model)
    assert (before.micro_batches(real.dp) > 1) == (after.micro_batches(layout.dp) > 1)
    assert runs.alone[1].world_size == 1 and runs.alone[0].model == after.model


SHAPES = {  # flags and ranks -> ranks of the small layout, and its text
    (f"{TP} 16 --num-attention-heads 64 --hidden-size 1024 --zero-stage 2", 400): (4, "pp 1 x dp 2 x tp 2"),
    (f"{PP} 8 --num-layers 48", 64): (6, "pp 3 (layers 3,2,2) x dp 2 x tp 1"),
    ("--zero-stage 3 --zero-shard-size 8", 64): (4, "pp 1 x dp 4 (2 x 2) x tp 1"),
    (f"{CP} 4 --zero-stage 2", 16): (4, "pp 1 x dp 2 x cp 2 x tp 1"),
    (f"{PP} 4 {TP} 4 {CP} 2", 64): (16, "pp 2 (layers 2,2) x dp 2 x cp 2 x tp 2"),
    (f"{TP} 8 --architecture llama --num-query-groups 2 --num-attention-heads 32 --hidden-size 1024", 16): (
        8, "pp 1 x dp 2 x tp 4",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("flags", "world"), SHAPES)
def test_a_mesh_shrinks_to_the_same_axes(flags: str, world: int) -> None:
    ranks, text = SHAPES[flags, world]
    runs, _, _ = shrunk(f"{flags} --vocab-size 50257", world)
    layout = runs.layout[1]
    assert layout.world_size == ranks
    assert re.sub(r" \(layers [\d,]*\)", "", layout_words(layout)) == re.sub(r" \(layers [\d,]*\)", "", text)


@for_each(
    ("flags", "world", "length"),
    [
        (f"{CP} 3", 6, 16 * 3 + 1),
        (f"{CP} 3 --seq-length 1536", 6, 16 * 3),
        (f"{CP} 3 --sequence-parallel", 6, 16 * 3 + 2),
        (f"{CP} 3 --sequence-parallel --micro-batch-size 2", 6, 16 * 3 + 1),
        (f"{CP} 2 --sequence-parallel --seq-length 1023 --micro-batch-size 2", 4, 16 * 2 + 1),
        (f"{CP} 3 --sequence-parallel", 12, 16 * 2),  # two ranks each, of which none can have a token more
    ],
)
def test_uneven_parts_of_a_sample_stay_uneven(flags: str, world: int, length: int) -> None:
    """Context-parallel ranks share 1024 tokens evenly or not; of a micro-batch, tp 2 ranks have as many each."""
    runs, _, _ = shrunk(f"{TP} 2 {flags} --vocab-size 500", world)
    assert runs.layout[0].model.seq_length == length


def test_a_shape_by_hand() -> None:
    """DeepSeek-V3 on 8 stages of tp 2 x cp 3 x dp 20: 2 layers for each of 2 stages, and one as 61 layers have a rest.

    4 of 8 groups of experts stay 2 of 4, of 2 experts each. Of heads of 8 instead of 192, 64 dims that turn are 2, and
    128 of values 5.
    """
    flags = f"{TP} 2 {PP} 8 {CP} 3 --expert-model-parallel-size 4 --sequence-parallel --global-batch-size 960"
    model = shrunk(f"--preset deepseek-v3-671b --vocab-size 50257 {flags}", 960)[0].layout[0].model
    assert (model.num_layers, model.moe_layer_freq) == (5, "DEDED")
    assert (model.num_attention_heads, model.hidden_size, model.ffn_hidden_size) == (4, 8, 16)
    assert (model.num_experts, model.moe_router_topk, model.moe_ffn_hidden_size) == (8, 2, 16)
    assert (model.moe_router_num_groups, model.moe_router_group_topk) == (4, 2)
    assert (model.qk_head_dim, model.qk_pos_emb_head_dim, model.v_head_dim) == (6, 2, 5)
    assert (model.kv_lora_rank, model.q_lora_rank) == (16, 24)


def test_a_small_mesh_and_a_small_model_stay() -> None:
    flags = "--num-layers 3 --hidden-size 12 --num-attention-heads 2 --seq-length 7 --vocab-size 31"
    runs, before, real = shrunk(f"{flags} --zero-stage 1", 3)
    assert runs.layout[1] == replace(real, split=runs.layout[1].split)
    kept = replace(runs.layout[0].model, init_method_std=before.model.init_method_std, max_position_embeddings=0)
    assert kept == replace(before.model, num_layers=kept.num_layers)


def test_ratios_of_a_batch_stay() -> None:
    """Padding stays padding, a ramp stays one; frozen blocks are those at the same place."""
    frozen = "--freeze-parameters token_embedding.* blocks.0.* blocks.11.*"
    flags = f"--micro-batch-size 4 --global-batch-size 1002 --rampup-batch-size 2 100 5000 {frozen}"
    runs, before, real = shrunk(f"{flags} --vocab-size 50257", 16)
    after, layout = runs.layout
    assert padding_samples(before, real.dp) and padding_samples(after, layout.dp)
    start, increment, _ = after.training.rampup_batch_size
    assert start < batch_sizes(after).full and (batch_sizes(after).full - start) % increment == 0
    assert after.training.freeze_parameters == ("token_embedding.*", "blocks.0.*", "blocks.1.*")


def test_a_model_suits_both_layouts() -> None:
    runs, _, _ = shrunk("--zero-stage 1 --vocab-size 999", 4, then=f"{TP} 2 {PP} 2")
    (config, _), (then, layout) = runs.layout, runs.then
    assert config.model == then.model and layout.tp == layout.pp == 2
    assert config.training.global_batch_size == then.training.global_batch_size


def test_a_resume_may_have_another_number_of_ranks() -> None:
    runs, _, _ = shrunk("--zero-stage 1 --vocab-size 999", 4, then=f"--world-size 6 {PP} 3 --micro-batch-size 2")
    assert runs.layout[1].world_size == 4
    assert runs.then[1].world_size == 6 and runs.then[0].training.micro_batch_size == 2


@for_each(
    "flags, world, even",
    [
        ("--moe-router-topk 2", 2, True),  # no rank sends tokens
        ("--moe-router-topk 2 --expert-model-parallel-size 2", 2, False),
        ("--moe-router-topk 4 --expert-model-parallel-size 2", 2, True),
        (f"--moe-router-topk 4 --expert-model-parallel-size 2 {CP} 2 --seq-length 33", 4, False),
        ("--moe-router-topk 2 --moe-expert-capacity-factor 0.5", 2, False),
        ("--moe-router-topk 4 --moe-expert-capacity-factor 0.5", 2, True),
        (f"--moe-router-topk 4 --moe-expert-capacity-factor 0.5 {CP} 2", 2, False),
        (f"--moe-router-topk 4 --moe-expert-capacity-factor 0.5 {TP} 2 --sequence-parallel", 2, True),
        (f"--moe-router-topk 4 --moe-expert-capacity-factor 0.5 {TP} 2 --sequence-parallel {ETP} 1", 2, False),
    ],
)
def test_bytes_are_planned_where_no_load_decides_them(flags: str, world: int, even: bool) -> None:
    """Drops leave ranks unequal loads where the tokens of a sample are on several of them."""
    model = "--architecture mixtral --num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2"
    line = f"{model} --num-experts 4 --vocab-size 64 --seq-length 32 {flags}"
    config, layout = resolve(parse(line.split()), world, 0, declare)
    assert unplanned(config, layout, on_gpu=False) == (() if even else UNBALANCED)
    assert set(unplanned(config, layout, on_gpu=True)) == {"peak", *(() if even else UNBALANCED)}


BAD = {
    "--steps 0": "--steps 0: must be at least 1",
    "--layout auto --global-batch-size 8": "--layout auto: there is no layout to verify yet",
    "--eval-only --load there": "--eval-only trains nothing",
    "--zero-stage 1 --world-size 4 --then --num-layers=4": "--then changes --num-layers",
    f"--then=--world-size=3 --world-size 2 {TP} 2": "does not divide the 3 ranks",
    f"{TP} 2 --world-size 3": "does not divide the 3 ranks",
    f"{TP} 5 --world-size 5": "--num-attention-heads 12 is not divisible",
    "--zero-stage 1 --json /nowhere/there.json": "the folder /nowhere does not exist",
    "--preset nothing": "no such file, nor a preset",
}


@pytest.mark.parametrize("flags", BAD)
def test_bad_input_is_a_sentence(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags.split()) == 2
    error = capsys.readouterr().err
    assert BAD[flags] in error and len(error.strip().splitlines()) == 1


def test_nan_and_infinity_fail() -> None:
    for wrong in (float("nan"), float("inf")):
        assert not row("loss", [Difference("step 1", 0.0, 1e-9), Difference("step 2", wrong, 1e-9)]).passed


def test_a_row_has_the_numbers_of_the_difference_nearest_to_its_tolerance() -> None:
    """Not of the largest difference, which may have the largest tolerance."""
    each = [Difference("a", 3e-3, 1e-2), Difference("b", 2e-9, 4e-9), Difference("c", 1e-5, 1e-3)]
    assert row("loss", each) == Row("loss", 2e-9, "b", tolerance=4e-9, passed=True)
    assert row("loss", [*each, Difference("d", 5e-7, 2e-7)]) == Row("loss", 5e-7, "d", tolerance=2e-7, passed=False)


def test_a_proof_has_each_number_in_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    """On the screen and in --json."""
    rows = [Row("loss", 1.5e-9, "step 2", 3.5e-7, True), Row("norm", math.inf, "step 3", 4.5e-6, False)]
    tables = {"fp32": rows, "fp64": [Row("bytes sent", 0.0, "dp, rank 7", 0.0, False, note="8 bytes, planned 9")]}
    proof = Proof(passed=False, words=["the run"], tables=tables, first="", lost="", seconds=11.2)
    show_proof(proof)
    said = capsys.readouterr().out
    assert [[cell.strip() for cell in line.split("│")[1:-1]] for line in said.splitlines() if line.startswith("│")] == [
        ["loss", "1.5e-09", "3.5e-07", "step 2", "PASS"],
        ["norm", "inf", "4.5e-06", "step 3", "FAIL"],
        ["bytes sent", "8 bytes, planned 9", "", "dp, rank 7", "FAIL"],
    ]
    heads = [[cell.strip() for cell in line.split("┃")[1:-2]] for line in said.splitlines() if line.startswith("┃")]
    assert heads == [["compared", "difference", "tolerance", "where it is largest"]] * 2
    assert said.endswith("FAIL: these differ: norm, bytes sent (12 s)\n")
    found = to_json(proof, Wanted(["--lr", "1"], 16, 5))
    keys = ("table", "what", "difference", "where", "tolerance", "passed", "note")
    assert [tuple(each[key] for key in keys) for each in found["rows"]] == [
        ("fp32", "loss", 1.5e-9, "step 2", 3.5e-7, True, ""),
        ("fp32", "norm", None, "step 3", 4.5e-6, False, ""),
        ("fp64", "bytes sent", 0.0, "dp, rank 7", 0.0, False, "8 bytes, planned 9"),
    ]
    assert (found["passed"], found["seconds"], found["shrunk"]) == (False, 11.2, ["the run"])
    assert (found["flags"]["world_size"], found["flags"]["steps"]) == (16, 5)
    verdicts = [proof._replace(first="a differs"), proof._replace(lost="rank 3 died"), proof._replace(passed=True)]
    assert [verdict_of(each).split(":")[0] for each in verdicts] == ["FAIL", "FAIL", "PASS"]
    assert [verdict_of(each).split(": ")[1] for each in verdicts[:2]] == ["a differs", "rank 3 died"]


def test_bytes_that_are_not_planned_are_named_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1, step 2; a step of a smaller batch is left out."""
    plans = ({"peak": 11, "host": 12}, {"dp": 21, "tp": 22})
    monkeypatch.setattr(planned, "estimate", lambda *_, **__: plans)
    step = VerifiedStep(1.0, 1.0, 1.0, 8, False, (), *plans, {}, {})
    wrong = step._replace(memory={"peak": 11, "host": 15}, traffic={"dp": 29, "tp": 22})
    config, layout = resolve(parse("--global-batch-size 8 --micro-batch-size 2".split()), 2, 99, declare)
    for steps, where in (([step, wrong], "2"), ([wrong._replace(samples=4), step, wrong], "3"), ([step, step], "")):
        ranks = [Trained([step] * 3, {}), Trained(steps, {})]
        said = [planned.byte_difference(config, layout, ranks, on_gpu=False, traffic=sent) for sent in (False, True)]
        assert said == [
            (f"host, rank 1, step {where}", "15 bytes, planned 12"),
            (f"dp, rank 1, step {where}", "29 bytes, planned 21"),
        ] or (not where and said == [("", "")] * 2)


def test_the_first_difference_is_named_with_its_step_its_size_and_the_number_of_others() -> None:
    """Steps 6 and 7 follow a resume. All gradients of a weight are as large as its place in the model."""
    flags = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 4 --vocab-size 12 --precision fp64"
    config, _ = resolve(parse(flags.split()), 1, 0, declare)
    layers, tolerance = declare(config.model), Tolerance(config, 1e-6, True)
    specs = [spec for layer, kind in layers.kinds.items() for spec in kind.params_of(layer, ())]
    gradients = {spec.name: np.full(spec.shape, 1.0 + n) for n, spec in enumerate(specs)}
    states = {f"{kind}.{name}": each for name, each in gradients.items() for kind in ("model", "exp_avg")}
    step, sums = VerifiedStep(4.0, 2.0, 0.5, 8, False, (), {}, {}, {}, {}), {("blocks.1", False): Sums(1.0, 16.0, 4)}
    steps = [step, step._replace(loss=5.0)]
    whole = Whole(steps, [sums] * 2, [gradients] * 2, states, "")

    def first(found: Whole, compares_layers: bool = True) -> str:
        comparison = Comparison(whole, found, config, layers=layers, tolerance=tolerance, before=5)
        return comparison.first([compares_layers] * 2)

    assert first(whole) == ""
    names = [spec.name for spec in specs]
    apart = gradients | {names[3]: gradients[names[3]] * 1.5, names[7]: gradients[names[7]] * 0.75}
    other = whole._replace(gradients=[gradients, apart])
    tail = f"{len(names)} gradients differ in that step"
    size = "(by {} of its size; rounding gives at most 1.0e-06)"
    assert first(other) == (
        f"the first thing that differs is the gradient of {names[3]}, step 7 {size.format('5.0e-01')}; 2 of {tail}"
    )
    lost = other._replace(steps=[step, step._replace(loss=6.0)])
    assert first(lost).startswith("the first thing that differs is the loss of step 7 (by 2.0e-01 of its size; ")
    assert first(lost).endswith(
        f"the first gradient in the order of the model is that of {names[3]}, step 7; 2 of {tail}"
    )
    norm = whole._replace(steps=[step._replace(norm=2.5), steps[1]])
    assert first(norm) == f"the first thing that differs is the gradient norm of step 6 {size.format('2.5e-01')}"
    results = whole._replace(layers=[sums, {("blocks.1", False): Sums(5.0, 16.0, 4)}])
    assert first(results).startswith("the first thing that differs is the output of blocks.1, step 7 (by 5.0e-01 of")
    assert first(results, compares_layers=False) == ""
    moments = whole._replace(states=states | {f"exp_avg.{names[2]}": gradients[names[2]] * 1.25})
    assert first(moments).startswith(
        f"all gradients agree; the first value that differs after step 7 is exp_avg.{names[2]} (by 2.5e-01 of"
    )
    rows = Comparison(whole, lost, config, layers, tolerance).rows([True, True])
    assert [(each.what, each.passed) for each in rows] == [
        ("loss", False), ("gradient norm", True), ("outputs of layers", True),
        (f"gradients of {len(names)} weights", False), ("weights after step 2", True),
        ("optimizer states after step 2", True), ("copies on several ranks", True),
    ]  # fmt: skip
    assert (rows[0].difference, rows[0].where, rows[3].where) == (0.2, "step 2", f"{names[3]}, step 2")


SUMMED = "--num-layers 5 --hidden-size 8 --num-attention-heads 2 --kv-channels 3 --ffn-hidden-size 32 --seq-length 7"


@for_each(
    ("more", "number"),
    [
        # a block: 4 products of 8, 2 heads of 3, 2 x 7 scores, 32 of the MLP; forward and twice as many backward
        ("", 3 * (5 * 84 + 8 + 11) + 6 * 7),
        # 3 chosen experts of 13 more; a further depth is a block and a head
        (
            "--architecture mixtral --num-experts 4 --moe-router-topk 3 --moe-ffn-hidden-size 13 --mtp-num-layers 1",
            3 * (6 * (84 + 39) + 8 + 2 * 11) + 6 * 7,
        ),
    ],
)
def test_terms_of_the_sums_behind_a_gradient_by_hand(more: str, number: int) -> None:
    """They bound fp64; results of a block that are rounded bound 16 bit; TF32 has the roundoff of fp16."""
    config = parse(f"{SUMMED} --vocab-size 11 --global-batch-size 6 {more}".split())
    blocks = 5 + config.model.mtp_num_layers
    for precision, relative in (
        ("fp64", 2.0**-53 * number**1.5),
        ("fp32", 8 * 2.0**-24 * number**0.5),
        ("bf16", 8 * 2.0**-8 * (3 * 12 * blocks) ** 0.5),
    ):
        found = Tolerance.of(with_values(config, {"precision": precision}), on_gpu=False)
        assert (terms(found.config), found.exact) == (number, precision == "fp64")
        assert found.relative == pytest.approx(relative)
    assert Tolerance.of(with_values(config, {"tf32": True}), True).relative == pytest.approx(8 * number**0.5 / 2**11)


def test_tolerances_of_losses_and_weights_by_hand() -> None:
    """Two weights of 6 and 4 elements; rates of 0.5, 0.25 and 2: each step before moves a loss by 2 lr |g|."""
    config = with_values(parse(f"{SUMMED} --vocab-size 11 --global-batch-size 6".split()), {"optimizer": "muon"})
    steps: Any = [SimpleNamespace(lr=lr, loss=loss, norm=0.0) for lr, loss in ((0.5, 9.0), (0.25, -5.0), (2.0, 4.0))]
    gradients = [{"a": np.array([3.0 * n] * 5 + [-4.0 * n]), "b": np.full(4, 1.0 * n)} for n in (1, 10, 100)]
    rough, exact = (Tolerance(config, 0.125, each) for each in (False, True))
    moved = [2 * lr * 0.125 * (6 * 4 + 4 * 1) * n for lr, n in ((0.5, 1), (0.25, 10))]
    assert rough.loss(2, steps, gradients) == pytest.approx(0.125 / (6 * 7) ** 0.5 + sum(moved) / 4)
    assert rough.loss(1, steps, gradients) == pytest.approx(0.125 / (6 * 7) ** 0.5 + moved[0] / 5)
    assert exact.loss(2, steps, gradients) == 0.125
    plain: Any = SimpleNamespace(shape=(2, 3), kind=WeightKind(False, False), matrices=())
    three: Any = SimpleNamespace(
        shape=(3, 4, 9), kind=WeightKind(True, False), matrices=(0,)
    )  # three matrices of 4 x 9
    assert (rough.moved(plain, steps, 1.0, []) == 2 * 2.75).all()
    for scale, factor in (("moonlight", 0.2 * 9**0.5), ("keller", (9 / 4) ** 0.5)):
        each = rough._replace(config=with_values(config, {"muon-scale": scale}))
        assert each.moved(three, steps, 1.0, []) == pytest.approx(np.full((3, 4, 9), 2 * 2.75 * factor))


def test_pieces_of_ranks_are_joined() -> None:
    """Two columns of a 2 x 4 matrix, cut in the middle of a row; and copies that differ are named."""
    left = TensorPart((2, 4), (0, 0), (2, 2), 0, 4, np.array([0.0, 1.0, 4.0, 5.0]))
    first, second = (TensorPart((2, 4), (0, 2), (2, 2), *at, np.array(data)) for at, data in (
        ((0, 3), [2.0, 3.0, 6.0]), ((3, 4), [7.0])))  # fmt: skip
    whole, unequal = joined([{"w": left}, {"w": first}, {"w": second}])
    assert np.array_equal(whole["w"], np.arange(8.0).reshape(2, 4)) and not unequal
    assert joined([{"w": left}, {"w": left}])[1] == ""
    assert joined([{"w": left}, {"w": left._replace(data=left.data + 1e-9)}])[1] == "w"


def test_the_layout_itself_is_the_least_of_few_ranks() -> None:
    _, _, real = shrunk(f"{TP} 2 {PP} 2 --zero-stage 0 --vocab-size 99")
    assert real.world_size == 4 and small_layout(real, shrunk("--vocab-size 99")[1].model).world_size == 4


def test_the_help_has_examples_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert "--preset zero-100b --world-size 400" in shown and "2 bad flags" in shown
