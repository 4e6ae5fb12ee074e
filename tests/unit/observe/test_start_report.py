"""The screen that a run begins with, and plan.txt."""

import re
from pathlib import Path

import numpy
import pytest
import torch

import pretrain_gpt
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.topology import Layout
from megazero.flags.cli import parse
from megazero.flags.config import Config
from megazero.flags.resolve import resolve
from megazero.flags.stages import read_stages
from megazero.host import Available, Machine
from megazero.observe import start_report
from megazero.observe.start_report import (
    cpu_text,
    details,
    drawing,
    hand_out,
    kept_lines,
    large_vocabulary,
    option_lines,
    screen,
)
from megazero.planner.bytes.estimate import KINDS, StageBytes, stage_bytes
from megazero.units import size
from tests.helpers.table import for_each

ROOT = Path(__file__).resolve().parents[3]
LARGE = (
    "--num-layers 48 --hidden-size 1600 --num-attention-heads 25 --seq-length 1024 --vocab-size 50257 --precision bf16 "
    "--micro-batch-size 8 --global-batch-size 512 --train-iters 100000 --lr 2e-4 --tensor-model-parallel-size 5 "
    "--pipeline-model-parallel-size 2 --recompute full --data-path corpus/owt --tokenizer gpt2:corpus --save runs/a"
)


def machine(ranks: int, device_type: str) -> Machine:
    device = Available(79 * 10**9, "free on its GPU") if device_type == "cuda" else None
    return Machine(range(ranks), device_type, device, Available(16 * 10**9, "of host memory"))


def shown(flags: str, world: int, device_type: str = "cpu", corpus: int = 0) -> list[str]:
    asked = parse(flags.split())
    device = "CPU, 4 threads" if device_type == "cpu" else "NVIDIA H100 80GB HBM3"
    return screen(asked, *resolve(asked, world, 257, declare), machine(world, device_type), device, corpus=corpus)


def test_the_documented_screens_are_what_is_shown() -> None:
    text = (ROOT / "docs" / "outputs.md").read_text()
    for flags, world, device_type, corpus in (
        ("--preset tiny --data-path corpus/small_text_document", 1, "cpu", 10**7),
        (LARGE, 20, "cuda", 9 * 10**9),
    ):
        block = "\n".join(shown(flags, world, device_type, corpus))
        assert f"```\n{block}\n" in text, f"docs/outputs.md should have\n{block}"


def test_a_screen_is_short_and_says_the_essentials() -> None:
    """At the smallest, model, memory and plan; at the largest, one screen of an ordinary terminal."""
    tiny = shown("--preset tiny", 1)
    assert [line.split()[0] for line in tiny if line[0] != " "] == ["model", "memory", "plan", "options", "kept"]
    assert "3.29 M parameters" in tiny[0] and "1.23 M tokens" in "".join(tiny)
    flags = "--preset gpt-1000b --pipeline-model-parallel-size 64 --data-path a b --save x --async-save --keep-last 2"
    huge = shown(flags, 1024, "cuda")
    assert len(huge) <= 15 and all(len(line) <= 120 for line in huge)


MIXTRAL = (  # of Mixtral 8x7B
    "--architecture mixtral --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --num-query-groups 8 "
    "--ffn-hidden-size 14336 --seq-length 4096 --vocab-size 32000"
)


@pytest.mark.second
@for_each(
    ("more", "said"),
    [
        ("", "8 in each of 32 layers, 2 active per token: 46.7 B parameters, 12.9 B active per token"),
        (
            "--moe-layer-freq 2 --moe-shared-expert-intermediate-size 8192",
            "8 in each of 16 layers, 2 active per token, and a shared one: 28.6 B parameters, 11.7 B active per token",
        ),
    ],
)
def test_experts_are_counted_and_parameters_that_are_active(
    more: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mixtral's numbers as published; by hand, 8 or 2 x 3 x 4096 x 14336 in 16 layers, and shared ones of 3 x 4096 x
    8192."""
    flags = f"{MIXTRAL} {more}"
    assert f"experts   {said}" in shown(flags, 1)
    pretrain_gpt.main([*flags.split(), "--plan", "--world-size", "64", "--device-type", "h100-80gb"])
    assert f"experts: {said}\n" in capsys.readouterr().out


@for_each(
    ("batch", "world", "said"),
    [
        (8, 3, "8 samples (3 ranks x 3 x micro-batch 1, 1 of 9 samples padding) of"),
        (9, 3, "9 samples (3 ranks x 3 x micro-batch 1) of"),
        (3, 8, "5 of 8 data-parallel ranks compute only padding: --global-batch-size 3 is 3 x --micro-batch-size 1"),
    ],
)
def test_padding_is_named(batch: int, world: int, said: str) -> None:
    flags = f"--preset tiny --micro-batch-size 1 --global-batch-size {batch}"
    words = " ".join(" ".join(shown(flags, world)).split())
    assert said in words and ("padding" in said) == ("padding" in words)


LION = "--optimizer lion: no loss depends on the biases of keys that are not rotated"
ONE_EXPERT = "--moe-router-topk 1 without --moe-router-pre-softmax: the weight of a token's only expert is always 1"


@for_each(
    ("flags", "said"),
    [
        ("--optimizer lion", LION),
        ("--optimizer lion --architecture gpt-neox", LION),
        ("--optimizer lion --architecture llama --add-qkv-bias --layer-pattern GN", LION),
        ("--optimizer lion --architecture llama --add-qkv-bias", ""),
        ("--optimizer lion --architecture gptj", ""),
        ("--optimizer adamw", ""),
        ("--architecture mixtral --num-experts 4 --moe-router-topk 1", ONE_EXPERT),
        ("--architecture mixtral --num-experts 4 --moe-router-topk 1 --eval-only --load runs/a", ""),
        ("--architecture olmoe --num-experts 4 --moe-router-topk 1", ""),
    ],
)
def test_gradients_that_are_rounding_are_a_warning(flags: str, said: str) -> None:
    text = " ".join(" ".join(shown(f"--num-layers 2 --hidden-size 24 --num-attention-heads 3 {flags}", 1)).split())
    assert said in text and ("warning" in text) == bool(said)


def test_the_plan_says_how_many_epochs() -> None:
    """1.23 M tokens, of a training split of `known` tokens."""
    for corpus, said in (
        (10**5, "tokens, 12.3 epochs"),
        (10**9, "tokens, 0.0012 epochs"),
        (0, ""),
    ):
        words = " ".join(" ".join(shown("--preset tiny", 1, corpus=corpus)).split())
        assert f"1.23 M {said}" in words and ("epochs" in words) == (corpus > 0)


def test_stages_have_lengths_and_corpora_of_their_own(tmp_path: Path) -> None:
    """5 iterations of 4 samples: 8 of 1,024 tokens, 12 of 512; the third stage is not reached."""
    stages = tmp_path / "stages.toml"
    stages.write_text(
        '[[stage]]\nfrom-sample = 8\nseq-length = 512\ndata-path = ["2", "d", "1", "e"]\n'
        '[[stage]]\nfrom-sample = 24\nseq-length = 256\ndata-args-path = "list"\n'
    )
    flags = f"--preset tiny --seq-length 1024 --data-path c --data-stages {stages} --save x --train-iters 5"
    asked = parse(f"{flags} --global-batch-size 4 --micro-batch-size 1".split())
    resolved = resolve(asked, 2, 257, declare)
    lines = screen(asked, *resolved, machine(2, "cpu"), "CPU", corpus=9999, stages=read_stages(resolved[0]))
    at = next(n for n, line in enumerate(lines) if line.startswith("stages"))
    assert [line[10:] for line in lines[at : at + 3]] == [
        "1, from sample 0: samples of 1,024 tokens, c",
        "2, from sample 8: samples of 512 tokens, 2 d 1 e",
        "3, from sample 24: samples of 256 tokens, list",
    ]
    plan = " ".join(line for line in lines[:at] if "micro-batch" in line)
    assert plan.endswith("(2 ranks x 2 x micro-batch 1) of 1,024 tokens: 14.3 k tokens")


def test_memory_is_that_of_the_fullest_rank_beside_what_there_is() -> None:
    flags = "--preset tiny --pipeline-model-parallel-size 2 --pipeline-schedule gpipe"
    config, layout = resolve(parse(flags.split()), 2, 257, declare)
    peaks = [stage_bytes(config, layout, pp, "cpu").peak for pp in (0, 1)]
    most = max(peaks)
    words = (
        f"{size(most)} per rank of stage {peaks.index(most)}, {size(2 * most)} for this node's 2 of the 16.0 GB of host"
    )
    assert words in " ".join(" ".join(shown(flags, 2)).split())


def made_bytes(peak: int) -> StageBytes:
    """At a peak of 5,000 MB, all kinds but one, which is below 2 % of it, have another number of MB."""
    at_peak = {kind: peak * (n + 1) // 40 for n, kind in enumerate(KINDS)} | {"logits": peak // 51}
    memory = {"host": 77_000_000, "nvme": 88_000_000, "parameters": 99_000_000}
    return StageBytes(memory, {}, 1, 2, peak, at_peak, 3, (0, 0), 0)


def test_the_memory_line_has_each_kind_and_each_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three stages; the line has the first or the last, and the GPU's memory, or the node's if there is no GPU."""
    made = {0: made_bytes(4_000_000_000), 2: made_bytes(5_000_000_000)}
    monkeypatch.setattr(start_report, "stage_bytes", lambda config, layout, pp, kind: made[pp])
    flags = "--preset tiny --num-layers 6 --pipeline-model-parallel-size 3 --data-path c"
    kinds = (
        "besides libraries: weights 125 MB, optimizer states 250 MB, gradients 375 MB, inputs kept for recompute 500 "
        "MB, buffers 625 MB, activations 875 MB; and 77.0 MB of host memory; and 88.0 MB in a file"
    )
    for device, place in (("cuda", "79.0 GB free on its GPU"), ("cpu", "16.0 GB of host memory")):
        text = " ".join(" ".join(shown(flags, 6, device)).split())
        node = ", 30.0 GB for this node's 6" if device == "cpu" else ""
        assert f"memory 5.00 GB per rank of stage 2{node} of the {place}, {kinds}" in text


@for_each(
    ("layout", "wanted"),
    [
        (Layout(), []),
        (Layout(dp=4), ["ranks 0-3: each a copy of the model"]),
        (Layout(dp=64), ["ranks 0-63: each a copy of the model"]),
        (Layout(dp=2, tp=4), ["ranks [0-3] [4-7]: each [ ] one copy of the model"]),
        (
            Layout(pp=2, dp=2, tp=2),
            ["stage 0: token table, layers 0-3: ranks [0-1] [2-3]", "stage 1: layers 4-7, head: ranks [4-5] [6-7]"],
        ),
        (
            Layout(pp=2, chunks=2, v_shaped=True),
            ["stage 0: token table, layers 0-1, 6-7, head: ranks 0", "stage 1: layers 2-3, 4-5: ranks 1"],
        ),
        (
            Layout(pp=8, dp=512),
            [
                "stage 0: token table, layers 0: ranks 0-511",
                "stage 1: layers 1: ranks 512-1023",
                "stage 2: layers 2: ranks 1024-1535",
                "...",
                "stage 7: layers 7, head: ranks 3584-4095",
            ],
        ),
    ],
)
def test_the_drawing_says_which_ranks_hold_what(layout: Layout, wanted: list[str]) -> None:
    config = parse(["--num-layers", "8", "--zero-stage", "2"])
    found = drawing(config, layout)
    assert found[1:] == wanted
    if layout.dp > 1:
        assert f"sharded over {layout.shard} data-parallel ranks" in found[0]


@for_each(
    ("flags", "world", "lines"),
    [
        (
            "--zero-stage 2 --data-path c --reset-attention-mask --reset-position-ids --cp-exchange all-gather",
            12,
            (
                "4 data-parallel x 3 context-parallel = 12 ranks; ZeRO stage 2: optimizer states and gradients sharded "
                "over 12 data-parallel x context-parallel ranks",
                "ranks {0 1 2} {3 4 5} {6 7 8} {9 10 11}: each a copy of the model",
                "; of documents: cp_imbalance in metrics.jsonl; --cp-exchange all-gather",
            ),
        ),
        (
            "--tensor-model-parallel-size 2 --mock-data --zero-shard-size 3",
            24,
            (
                "4 data-parallel x 3 context-parallel x 2 tensor-parallel = 24 ranks; ZeRO stage 1: optimizer states "
                "sharded over 3 data-parallel x context-parallel ranks, 4 copies",
                "ranks {[0-1] [2-3] [4-5]} {[6-7] [8-9] [10-11]} {[12-13] [14-15] [16-17]} {[18-19] [20-21] [22-23]}: "
                "each [ ] one copy of the model",
                "; --cp-exchange auto",
            ),
        ),
    ],
)
def test_the_drawing_of_shared_samples_has_every_axis(flags: str, world: int, lines: tuple[str, str, str]) -> None:
    """23 tokens on three ranks: of 23 x 24 / 2 = 276 pairs of tokens the busiest has 96, and the mean is 92."""
    asked = "--num-layers 2 --vocab-size 99 --seq-length 23 --context-parallel-size 3 --global-batch-size 4"
    *shown, tokens = drawing(*resolve(parse(f"{asked} --micro-batch-size 1 {flags}".split()), world, 0, declare))
    assert shown == list(lines[:2])
    words = "tokens: ranks in { } share each sample, 7 to 8 tokens each; work of attention even within 4.3%"
    assert tokens == f"{words}{lines[2]}"


def test_queued_gradients_are_a_warning_with_full_recompute_alone() -> None:
    flags = "--num-layers 4 --hidden-size 24 --num-attention-heads 3 --seq-length 8"
    flags += " --pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble"
    for recompute in ("none", "full"):
        text = " ".join(shown(f"{flags} --recompute {recompute} --micro-batch-size 1 --global-batch-size 8", 2))
        assert ("queued" in text) == ("warning" in text) == (recompute == "full")


def test_the_drawing_has_the_work_of_the_busiest_owner_of_matrices() -> None:
    """A block of GPT-2 has matrices of 4 h h and 8 h h elements, so two ranks are even with two blocks alone."""
    for layers, words in ((1, "the busiest has 1.33 times the mean work"), (2, "the busiest has 1.00 times")):
        config = parse(f"--num-layers {layers} --vocab-size 256 --optimizer muon".split())
        assert words in drawing(config, Layout(dp=2))[0], layers
    assert "busiest" not in drawing(config, Layout())
    assert "busiest" not in drawing(parse(["--vocab-size", "256"]), Layout(dp=2))[0]


def test_only_options_that_differ_are_listed() -> None:
    """From the preset's where there is one; without those that the lines above have printed."""
    assert option_lines(Config()) == []
    found = option_lines(
        parse(["--preset", "tiny", "--lr", "1e-3", "--adam-beta2", "0.9", "--num-layers", "2", "--no-tf32"])
    )
    assert found == ["--preset tiny", "--no-tf32", "--adam-beta2 0.9"]
    assert option_lines(parse(["--data-path", "1", "a", "2", "b", "--clip-grad", "0"])) == [
        "--clip-grad 0.0",
        "--data-path 1 a 2 b",
    ]


def test_plan_txt_has_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--preset", "tiny", "--log-dir", str(tmp_path / "log")]
    config, layout = resolve(parse(flags), 4, 257, declare)
    text = details(
        config, layout, machine(4, "cpu"), ["a", "a", "b", "b"], {"OMP_NUM_THREADS": "3"}, "a note", "--lr 2  a preset"
    )
    hand_out(config, ["the screen"], text)
    said = capsys.readouterr().out
    assert said.startswith("more ") and "plan.txt" in said and len(said.splitlines()) == 1
    written = (tmp_path / "log" / "plan.txt").read_text()
    assert written.startswith("the screen\n\nestimated bytes of rank 0")
    parts = ("a note", "OMP_NUM_THREADS=3", "a: ranks 0-1", "b: ranks 2-3", "\nadam-beta2 = 0.95\n")
    for words in (*parts, "\n  --lr 2  a preset\n"):
        assert words in written
    assert f"torch {torch.__version__}, numpy {numpy.__version__}, " in written
    assert re.search(r"global-batch-size = 16\b", written)
    verbose, _ = resolve(parse([*flags[:2], "--verbose"]), 4, 257, declare)
    hand_out(verbose, ["the screen"], text)
    assert capsys.readouterr().out == text + "\n"


def test_a_log_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    config, _ = resolve(parse(["--preset", "tiny", "--log-dir", str(tmp_path / "file" / "log")]), 1, 257, declare)
    (tmp_path / "file").write_text("")  # only now, because the start refuses an existing file
    with pytest.raises(ValueError, match=r"--log-dir .*file/log: "):
        hand_out(config, [], "")


def test_the_device_of_a_cpu_has_threads_and_says_what_is_slow() -> None:
    slow, fast, other = {"sse2", "avx2"}, {"sse2", "avx512_bf16"}, {"asimd"}
    assert cpu_text("bf16", 2, slow) == "CPU, 2 threads; bf16 is slower than fp32 on this CPU, which has no AMX"
    assert cpu_text("fp32", 2, slow) == cpu_text("bf16", 2, fast) == cpu_text("bf16", 2, other) == "CPU, 2 threads"
    assert cpu_text("fp16", 1, fast).startswith("CPU, 1 thread; fp16 is slower")


def test_what_a_run_does_not_keep_is_said() -> None:
    def said(*flags: str) -> str:
        return kept_lines(parse(list(flags)))

    assert "--save DIR" in said() and "--log-dir DIR" in said() and said().startswith("nothing")
    assert "--log-dir DIR" in said("--save", "a") and "--save DIR" not in said("--save", "a")
    assert "--save DIR" in said("--log-dir", "a") and "--log-dir DIR" not in said("--log-dir", "a")
    assert said("--save", "a", "--log-dir", "a") == "" == said("--eval-only", "--load", "a")


def test_a_vocabulary_far_larger_than_the_tokenizer_is_said() -> None:
    large = parse(["--vocab-size", "50257"])
    assert "--vocab-size 50257 is 25 times the 2,048 ids" in large_vocabulary(large, 2048)
    assert large_vocabulary(parse(["--vocab-size", "50257", "--mock-data"]), 2048) == ""  # which draws from all
    assert large_vocabulary(large, 0) == large_vocabulary(large, 50000) == large_vocabulary(large, 32000) == ""
