"""pretrain_gpt.py as its users run it: layouts, resuming, files, and messages of failures."""

import errno
import json
import math
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import pretrain_gpt
from megazero import checkpoint
from megazero.checkpoint import verify
from megazero.checkpoint.locking import SaveLock
from megazero.cluster import launch
from megazero.run.checkpoints import Checkpoints
from tests.end_to_end.cli import ROOT, metrics, pretrain, pretrain_cold, run
from tests.helpers.programs import rank_environment, warm

LAYOUTS = {
    "dp3 zero2, M 2": (3, "--zero-stage 2"),
    "tp2 recompute pa, M 6": (2, "--tensor-model-parallel-size 2 --recompute full --partition-activations"),
    "pp2 dp2 zero3, M 3": (4, "--pipeline-model-parallel-size 2 --zero-stage 3"),
    "sp, selective, M 6": (2, "--tensor-model-parallel-size 2 --sequence-parallel --recompute selective"),
    "c5": (2, "--preset c5 --lr-warmup-iters 0 --weight-decay 0.01"),
    "pp2 gpipe, M 12": (2, "--pipeline-model-parallel-size 2 --pipeline-schedule gpipe --micro-batch-size 1"),
}


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory) -> Path:
    """Log folder of the single process: ten iterations."""
    folder = tmp_path_factory.mktemp("alone")
    done = pretrain(*model, "--train-iters", 10, "--log-dir", folder, "--eval-interval", 5, "--eval-iters", 2)
    assert done.returncode == 0, done.stderr
    return folder


def close(found: list[dict], wanted: list[dict], key: str) -> bool:
    return all(abs(a[key] - b[key]) < 1e-5 * abs(b[key]) for a, b in zip(found, wanted, strict=True))


RINGS = {"c5": pytest.mark.second}  # tests/parallel has them all


@pytest.mark.parametrize("name", [pytest.param(n, marks=RINGS.get(n, pytest.mark.slow)) for n in LAYOUTS])
def test_every_layout_has_the_single_process_curve(name: str, model, alone: Path, tmp_path: Path) -> None:
    ranks, flags = LAYOUTS[name]
    done = pretrain(*model, *flags.split(), "--train-iters", 5, "--log-dir", tmp_path, ranks=ranks)
    assert done.returncode == 0, done.stderr
    found, wanted = metrics(tmp_path), metrics(alone)[:5]
    assert close(found, wanted, "loss") and close(found, wanted, "grad_norm")
    measured = [m["iteration"] for m in found if m.get("bubble", -1) >= 0 and m.get("bubble_simulated", -1) >= 0]
    assert measured == ([5] if "pp2" in name else [])  # --log-interval 5
    assert all("bubble" not in m for m in found[:4])


def test_a_folder_that_another_run_saves_into_is_refused(model, tmp_path: Path) -> None:
    lock = SaveLock(tmp_path)
    try:
        done = pretrain(*model, "--train-iters", 1, "--save", tmp_path)
    finally:
        lock.release()
    assert done.returncode == 1 and f"--save {tmp_path} is in use by process {os.getpid()} on " in done.stderr


def test_clocks_of_a_run(model, tmp_path: Path) -> None:
    """Save at each iteration by a time that always has passed; then stop before the first step of the next run."""
    done = pretrain(*model, "--train-iters", 3, "--save", tmp_path, "--save-interval-minutes", 1e-5)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name[-1] for path in tmp_path.glob("iter_*")) == ["1", "2", "3"]
    again = pretrain(*model, "--train-iters", 9, "--load", tmp_path, "--exit-duration-minutes", 1e-5)
    assert again.returncode == 0 and "stopped after iteration 3 by --exit-duration-minutes" in again.stdout


def test_metrics_are_as_defined(alone: Path, model) -> None:
    found = metrics(alone)
    assert [m["iteration"] for m in found] == list(range(1, 11))
    assert [m["consumed_samples"] for m in found] == list(range(12, 121, 12))
    assert [m["iteration"] for m in found if "validation_loss" in m] == [5, 10]
    assert found[-1]["loss"] < found[0]["loss"] < 6
    assert abs(found[0]["loss"] - math.log(257)) < 0.5
    keys = {"loss_scale", "skipped", "step_seconds", "tokens_per_second", "tflops_per_device", "lr", "grad_norm"}
    assert keys <= set(found[0])
    m = found[0]
    assert m["tokens_per_second"] == pytest.approx(12 * 33 / m["step_seconds"])
    flops = 72 * 12 * 5 * 33 * 48**2 * (1 + 33 / (6 * 48) + 257 / (12 * 48 * 5))
    assert m["tflops_per_device"] == pytest.approx(flops / m["step_seconds"] / 1e12)
    memory = "parameters optimizer gradients activation_checkpoints buffers logits peak host nvme".split()
    assert sorted(m["memory_bytes"]) == sorted(memory)
    assert m["traffic_bytes"] == dict.fromkeys("dp cp ep tp pp control pcie nvme".split(), 0)


def test_config_is_saved_as_a_preset(alone: Path, tmp_path: Path) -> None:
    text = (alone / "config.toml").read_text()
    values = tomllib.loads(text)
    assert values["train-iters"] == 10 and values["tokenizer"] == "byte"
    assert not values.keys() & {"vocab-size", "ffn-hidden-size", "precision"}  # they were not given
    assert "# vocab-size = 257\n" in text and "# ffn-hidden-size = 192\n" in text
    done = pretrain("--preset", alone / "config.toml", "--log-dir", tmp_path, "--train-iters", 2)
    assert done.returncode == 0, done.stderr
    assert [m["loss"] for m in metrics(tmp_path)] == [m["loss"] for m in metrics(alone)[:2]]


@pytest.mark.parametrize(
    "ranks, flags",
    [
        pytest.param(1, "", id="alone"),
        pytest.param(2, "--zero-stage 3 --precision bf16", marks=pytest.mark.slow, id="dp2"),
    ],
)
def test_resumes_to_the_bit(ranks: int, flags: str, model, tmp_path: Path) -> None:
    """6 iterations are 3, a stop, and 3 more; the decay and the evaluation continue."""
    common = [*model, *flags.split(), "--train-iters", 6, "--lr-decay-style", "cosine", "--lr-warmup-iters", 2]
    common += ["--eval-interval", 3, "--eval-iters", 1]
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert pretrain(*common, "--log-dir", whole, ranks=ranks).returncode == 0
    for half in (1, 2):
        again = [*common, "--log-dir", halves, "--save", halves, "--load", halves, "--exit-interval", 3]
        done = pretrain(*again, ranks=ranks)
        assert done.returncode == 0, done.stderr
        assert (halves / "latest").read_text().strip() == f"iter_{3 * half:07}"
    found, wanted = metrics(halves), metrics(whole)
    for key in ("iteration", "consumed_samples", "loss", "grad_norm", "lr", "memory_bytes", "traffic_bytes"):
        assert [m[key] for m in found] == [m[key] for m in wanted], key
    assert found[5]["validation_loss"] == wanted[5]["validation_loss"]
    done = pretrain(*common, "--log-dir", halves, "--load", halves / "iter_0000003", "--train-iters", 4, ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert [m["iteration"] for m in metrics(halves)] == [1, 2, 3, 4]  # lines after the checkpoint are cut


@pytest.mark.slow  # tests/parallel/test_resume_layouts.py has many pairs of layouts
def test_another_layout_resumes(model, tmp_path: Path) -> None:
    """Saved by tp 2, resumed by pp 2 x dp 2 under ZeRO 2, and by a single process: the same curve."""
    common = [*model, "--train-iters", 8, "--lr-decay-style", "linear"]
    saved = tmp_path / "saved"
    flags = ["--tensor-model-parallel-size", 2, "--save", saved, "--exit-interval", 4, "--log-dir", tmp_path / "a"]
    assert pretrain(*common, *flags, ranks=2).returncode == 0
    done = pretrain(*common, "--load", saved, "--log-dir", tmp_path / "b")
    assert done.returncode == 0, done.stderr
    flags = ["--pipeline-model-parallel-size", 2, "--zero-stage", 2, "--load", saved, "--log-dir", tmp_path / "c"]
    done = pretrain(*common, *flags, ranks=4)
    assert done.returncode == 0, done.stderr
    found, wanted = metrics(tmp_path / "c"), metrics(tmp_path / "b")
    assert [m["iteration"] for m in found] == [5, 6, 7, 8]
    assert close(found, wanted, "loss") and close(found, wanted, "grad_norm")


@pytest.mark.slow  # test_generate.py tests generation itself
def test_generates_text(model, tmp_path: Path) -> None:
    flags = ["--train-iters", 3, "--save", tmp_path, "--tensor-model-parallel-size", 2]
    assert pretrain(*model, *flags, ranks=2).returncode == 0
    generate = ["scripts/generate.py", "--load", tmp_path, "--prompt", "the", "--max-new-tokens", 40]
    first, second, greedy = run(sys.executable, *generate), warm(*generate), warm(*generate, "--temperature", 0)
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("the") and len(first.stdout) > 20
    assert first.stdout == second.stdout != greedy.stdout
    assert "generated 40 tokens in" in greedy.stderr and "tokens/s" in greedy.stderr
    sharded = warm(*generate, "--temperature", 0, "--tensor-model-parallel-size", 2, ranks=2)
    assert sharded.returncode == 0 and sharded.stdout == greedy.stdout, sharded.stderr
    done = warm("scripts/generate.py", "--load", tmp_path / "nothing")
    assert done.returncode == 1 and "--load" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow  # of fp64 itself tests/parallel has much
def test_an_fp64_run_is_fp64_on_disk_and_resumes_to_the_bit(model, tmp_path: Path) -> None:
    common = [*model, "--precision", "fp64", "--log-dir", tmp_path]
    assert pretrain(*common, "--train-iters", 4).returncode == 0
    whole = metrics(tmp_path)
    for iterations in (2, 4):
        done = pretrain(*common, "--train-iters", iterations, "--save", tmp_path, "--load", tmp_path)
        assert done.returncode == 0, done.stderr
    assert [m["loss"] for m in metrics(tmp_path)] == [m["loss"] for m in whole]
    tensors = json.loads((tmp_path / "iter_0000004" / "manifest.json").read_text())["tensors"]
    assert {entry["dtype"] for entry in tensors.values()} == {"float64"}
    done = pretrain(*model, "--load", tmp_path)
    assert done.returncode == 1 and re.search("is float64 .* there and float32 .* here", done.stderr)
    done = warm("scripts/generate.py", "--load", tmp_path, "--prompt", "the", "--temperature", 0)
    assert done.returncode == 0 and done.stdout.startswith("the"), done.stderr


@pytest.mark.second
def test_tensorboard_and_wandb(model, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = ["--tensorboard-dir", tmp_path / "tb", "--wandb-project", "test", "--log-dir", tmp_path]
    done = pretrain(*model, "--train-iters", 2, *flags)
    assert done.returncode == 0, done.stderr
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    losses = [m["loss"] for m in metrics(tmp_path)]
    assert [e.value for e in events.Scalars("loss")] == pytest.approx(losses)
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


# -- bad input


BAD = {
    "sizes that do not divide": (["--num-attention-heads", 7], ["--hidden-size 48", "--num-attention-heads 7"]),
    "a layout that does not fit": (["--tensor-model-parallel-size", 2], ["--tensor-model-parallel-size 2", "1 ranks"]),
    "an unknown preset": (["--preset", "gpt2-124n"], ["--preset gpt2-124n", "gpt2-124m"]),
    "no data": (["--data-path", "/nowhere/corpus"], ["--data-path", "/nowhere/corpus"]),
    "a sample longer than the data": (
        ["--seq-length", 100000, "--micro-batch-size", 1],
        ["--data-path", "--seq-length 100000"],
    ),
    "an unreadable tokenizer": (["--tokenizer", "/nowhere"], ["--tokenizer", "/nowhere"]),
    "a small vocabulary": (["--vocab-size", 200], ["--vocab-size 200", "257"]),
    "an empty validation split": (["--split", "1,0,0", "--eval-interval", 1], ["--split 1,0,0", "validation"]),
    "a file where a folder should be": (["--save", ROOT / "LICENSE"], ["--save", "is a file, not a folder"]),
    "Pa without tp": (["--partition-activations", "--recompute", "full"], ["--partition-activations", "drop"]),
    "a checkpoint that is not there": (["--load", "/nowhere/iter_0000001"], ["--load /nowhere/iter_0000001"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_before_anything_is_made(name: str, model, refusal, tmp_path: Path) -> None:
    flags, words = BAD[name]
    where = ["--log-dir", tmp_path / "logs", "--save", tmp_path / "saved"]
    done = refusal(*model, "--train-iters", 1, *where, *flags)
    assert done.returncode == 1
    assert done.stderr.startswith("error: "), done.stderr
    for word in words:
        assert word in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_file_system_that_fails_at_the_load_is_refused(
    ranks: int, model, refusal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank ends without a traceback. The first of two prints the reason before it waits for the other."""

    def fail(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error", str(path))

    def never(*_: object) -> None:
        raise ValueError("too few ranks")

    monkeypatch.setattr(checkpoint, "find", fail)
    if ranks == 2:
        monkeypatch.setattr(launch, "start", never)
        for name, value in rank_environment(0, 2, 1).items():
            monkeypatch.setenv(name, value)
    done = refusal(*model, "--train-iters", 1, "--load", tmp_path)
    reason, first = f"{tmp_path}: Input/output error", f"rank 0: {tmp_path}: Input/output error; this rank ends once"
    said = done.stderr.splitlines()
    assert done.returncode == 1 and "Traceback" not in done.stderr
    if ranks == 1:
        assert said == [f"error: {reason}"]
    else:
        assert said[0].startswith(first) and said[1] == "rank 0: error: too few ranks"


@pytest.mark.slow
def test_compile_without_a_compiler(model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))  # without kernels compiled before
    done = pretrain_cold(*model, "--train-iters", 1, "--compile")  # torch reads CXX when it is imported
    assert done.returncode == 1
    assert "error: --compile: torch cannot compile here" in done.stderr and "drop --compile" in done.stderr


def test_mistyped_flag(model, refusal) -> None:
    done = refusal(*model, "--micro-batch-sise", 4)
    assert done.returncode == 2 and "--micro-batch-size" in done.stderr


def test_a_checkpoint_of_another_model(model, tmp_path: Path) -> None:
    assert pretrain(*model, "--train-iters", 1, "--save", tmp_path).returncode == 0
    done = pretrain(*model, "--train-iters", 2, "--load", tmp_path, "--num-layers", 4)
    assert done.returncode == 1
    assert "--load" in done.stderr and "--num-layers 5, not 4" in done.stderr


def test_a_save_folder_of_another_run_is_not_overwritten(model, refusal, tmp_path: Path) -> None:
    assert pretrain(*model, "--train-iters", 1, "--save", tmp_path).returncode == 0
    done = refusal(*model, "--train-iters", 2, "--save", tmp_path)
    assert done.returncode == 1 and f"add --load {tmp_path}" in done.stderr
    (tmp_path / "iter_0000001").rename(tmp_path / "elsewhere")
    done = refusal(*model, "--train-iters", 2, "--load", tmp_path)
    assert done.returncode == 1 and "`latest` names iter_0000001, which is gone" in done.stderr


def test_data_of_another_tokenizer(model, refusal, corpus: Path, tmp_path: Path) -> None:
    train = ["data_tools/train_tokenizer.py", "--input", ROOT / "README.md", "--vocab-size", 300]
    assert warm(*train, "--output", tmp_path / "bpe").returncode == 0
    done = refusal(*model, "--train-iters", 1, "--tokenizer", tmp_path / "bpe")
    assert done.returncode == 1 and f"--data-path {corpus} was made with the tokenizer byte" in done.stderr


def test_an_empty_folder_as_load_and_save_starts_fresh(model, tmp_path: Path, refusal) -> None:
    done = pretrain(*model, "--train-iters", 1, "--load", tmp_path, "--save", f"{tmp_path}/.")
    assert done.returncode == 0 and "starting fresh" in done.stdout
    (tmp_path / "other").mkdir()
    done = refusal(*model, "--train-iters", 1, "--load", tmp_path / "other", "--save", tmp_path / "new")
    assert done.returncode == 1 and "other has nothing to load" in done.stderr and not (tmp_path / "new").exists()


def test_intervals_retention_and_workers(model, alone: Path, tmp_path: Path) -> None:
    """--save-interval and --keep-last on disk; batches read ahead by workers are the same ones."""
    flags = ["--save", tmp_path, "--save-interval", 2, "--keep-last", 2, "--num-workers", 1, "--log-dir", tmp_path]
    done = pretrain(*model, "--train-iters", 7, "--zero-stage", 2, *flags, ranks=2)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000006", "iter_0000007"]
    assert done.stdout.count("saved ") == 4  # at 2, 4, 6 and at the end
    assert close(metrics(tmp_path), metrics(alone)[:7], "loss")
    again = pretrain(*model, "--train-iters", 7, "--load", tmp_path, "--save", tmp_path)
    assert again.returncode == 0 and "nothing to do" in again.stdout and "saved " not in again.stdout


def test_masking_behind_documents(model, alone: Path, tmp_path: Path) -> None:
    done = pretrain(*model, "--train-iters", 3, "--eod-mask-loss", "--log-dir", tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"report    {tmp_path / 'report.html'}" in done.stdout
    start = json.loads((tmp_path / "events.jsonl").read_text().splitlines()[0])
    assert 0.9 < start["bytes_per_token"] < 1.0  # tokens are bytes, and ends of documents
    found, wanted = ([step["loss"] for step in metrics(folder)[:3]] for folder in (tmp_path, alone))
    assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) < 0.1
    assert found != wanted  # some of the batches hold a document's end


def test_a_bare_command_asks_for_data_first(refusal) -> None:
    done = refusal("--num-layers", 1)
    assert done.returncode == 1 and done.stderr.startswith("error: --data-path is missing; "), done.stderr
    assert "--mock-data --vocab-size" in done.stderr and "--tokenizer" not in done.stderr


def test_resuming_otherwise_is_said(model, tmp_path: Path) -> None:
    assert pretrain(*model, "--train-iters", 1, "--save", tmp_path, "--adam-beta2", 0.9).returncode == 0
    done = pretrain(*model, "--train-iters", 2, "--load", tmp_path, "--seed", 5)
    assert done.returncode == 0 and "WARNING: --seed is 5, and was 1234" in done.stderr
    assert "To continue as before, add: --adam-beta2 0.9\n" in done.stderr


@pytest.mark.second
def test_a_full_disk_costs_no_run_if_space_is_freed(
    model, refusal, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has room for the checkpoint of iteration 1; for the last one, if it grows in the wait for space."""
    sizes = iter(["size=3M", "size=20M"])

    def resize(*_: object) -> None:
        subprocess.run(["mount", "-o", f"remount,{next(sizes)}", str(small_disk)], check=True)

    resize()
    monkeypatch.setattr(Checkpoints, "waits", (1.0,))
    monkeypatch.setattr(Checkpoints, "wait", staticmethod(lambda seconds: None))
    flags = [*model, "--train-iters", 3, "--save", small_disk, "--load", small_disk, "--save-interval", 1]
    done = refusal(*flags)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    scheduled, again, end = done.stderr.splitlines()
    full = rf"saving {small_disk}/iter_000000\d failed on rank 0: \S+: No space left on device; free some space"
    assert re.match(rf"WARNING: {full}.* Training continues", scheduled), scheduled
    assert re.match(rf"WARNING: {full}.* Iteration 3 is still in memory: attempt 2 of 2 begins in 1 s", again), again
    wanted = f"After 2 attempts, iteration 3 is lost: the newest checkpoint in --save {small_disk} is iter_0000001"
    assert re.match(full, end) and wanted in end, end
    assert [path.name for path in checkpoint.checkpoints(small_disk)] == ["iter_0000001"]

    monkeypatch.setattr(Checkpoints, "wait", staticmethod(resize))
    pretrain_gpt.main([str(flag) for flag in flags])
    assert checkpoint.find(small_disk) == small_disk / "iter_0000003"
    assert not [*verify.faults(small_disk / "iter_0000003")]


def test_fp16_that_cannot_go_on_saves_and_says_where(model, tmp_path: Path) -> None:
    flags = ["--precision", "fp16", "--grad-dtype", "fp16", "--initial-loss-scale", 2**40, "--min-loss-scale", 2**39]
    done = pretrain(*model, *flags, "--train-iters", 20, "--save", tmp_path, "--zero-stage", 2, ranks=2)
    assert done.returncode != 0
    assert "--min-loss-scale" in done.stderr and "is not finite on rank" in done.stderr
    assert (tmp_path / "latest").read_text().strip() == "iter_0000002"  # two overflows were answered, the third not


def test_a_rank_that_raises_ends_the_run(model, corpus: Path, tmp_path: Path) -> None:
    """One rank alone reads an invalid token; it reports that, and the others do not wait for a time-out."""
    for suffix in (".bin", ".idx", ".json"):
        (tmp_path / f"bad{suffix}").write_bytes(corpus.with_name(corpus.name + suffix).read_bytes())
    about = json.loads((tmp_path / "bad.json").read_text())
    del about["checksum"]  # which would find it at the start
    (tmp_path / "bad.json").write_text(json.dumps(about))
    with (tmp_path / "bad.bin").open("r+b") as file:
        file.seek(27000)
        file.write(b"\xff\xff")  # PREFIX.json, which the start trusts, excludes such a token
    # Its sample comes after 25 iterations, and is rank 1's: rank 0 would take the store of all reports with it.
    small = ["--num-layers", 1, "--micro-batch-size", 6, "--split-by", "documents"]
    flags = [*small, "--data-path", tmp_path / "bad", "--train-iters", 500, "--distributed-timeout-minutes", 5]
    done = pretrain(*model, *flags, ranks=2)  # which waits for less than the time-out
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("rank ")]
    assert "error: --data-path" in said[0] and "65535" in said[0]  # before anybody else's lament
    last = [line for line in said[1:] if not line.endswith("asking the others why")]
    assert all("stopping because another rank failed: rank" in line and "65535" in line for line in last)


PLANTED = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import os, pretrain_gpt, torch
from megazero.engine.step.engine import Engine

build = Engine.__init__

def planted(self, *args):
    build(self, *args)
    if os.environ["RANK"] == "1":
        block, calls = self.model.blocks["2"], []
        forward = block.forward

        def full(*args):
            calls.append(1)
            if len(calls) == 2:
                raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
            return forward(*args)

        block.forward = full

Engine.__init__ = planted
pretrain_gpt.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_memory_that_runs_out_is_the_last_word_of_its_rank(model, tmp_path: Path) -> None:
    """Rank, operation, layer and micro-batch; a table on that rank alone; the other, if torchrun lets it speak, where
    it was stopped."""
    (tmp_path / "planted.py").write_text(PLANTED)
    torchrun = "-m torch.distributed.run --rdzv-backend c10d --rdzv-endpoint localhost:0 --nproc-per-node 2"
    flags = ["--train-iters", 3, "--pipeline-schedule", "gpipe"]
    done = run(sys.executable, *torchrun.split(), tmp_path / "planted.py", ROOT, *model, *flags)
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("rank ")]
    words = "rank 1: OutOfMemoryError: Tried to allocate 2.00 GiB in operation 'Forward blocks.2 mb 1' of the step"
    assert said[0] == words
    assert done.stderr.count("memory of rank 1 in Forward blocks.2 mb 1, MiB:") == 1
    assert "memory of rank 0" not in done.stderr
    lost, cause = (
        r"rank 0: .* in operation '[^']+' of the step; asking the others why",
        rf"rank 0: stopping because another rank failed: {re.escape(words)}",
    )
    assert all(re.fullmatch(f"{lost}|{cause}", line) for line in said[1:])


def test_a_trace_of_two_ranks(model, tmp_path: Path) -> None:
    flags = ["--pipeline-model-parallel-size", 2, "--train-iters", 3, "--profile-iterations", "2:3"]
    done = pretrain(*model, *flags, "--log-dir", tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    assert f"wrote {tmp_path}/trace-2-3.json" in done.stdout
    events = json.loads((tmp_path / "trace-2-3.json").read_text())["traceEvents"]
    spans = {(event["pid"], event["name"]) for event in events if event["ph"] == "X"}
    assert {(0, "Forward token_embedding mb 0"), (1, "Backward head mb 1"), (1, "iteration 3")} <= spans


def test_help_teaches() -> None:
    done = pretrain_cold("--help")
    text = " ".join(done.stdout.replace("│", " ").split())  # wherever lines are broken
    assert done.returncode == 0
    for words in (
        "--zero-stage {0,1,2,3}",
        "default: 0.0003",
        "--help-all",
        "--split",
        "Example: python pretrain_gpt.py",
        "--preset",
    ):
        assert words in text
