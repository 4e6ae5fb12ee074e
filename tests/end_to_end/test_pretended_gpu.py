"""The programs, whole, on the pretended GPU: training with offload, saves and a resume; generation; a benchmark."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.end_to_end.cli import metrics, pretrain
from tests.helpers.programs import warm

TRAINING = (
    "--precision fp32 --no-tf32 --fused-kernels eager --recompute full --checkpoint-in-cpu --eval-interval 2 "
    "--eval-iters 1 --train-iters 4 --log-interval 1"
).split()


def on_gpu(report: Path, program: str, *flags: object, ranks: int = 1) -> tuple[str, list[Counter[str]]]:
    """Run a program on pretended GPUs; return its output, and the host's waits on each rank. Nothing may be found."""
    done = warm("tests/end_to_end/on_pretended_gpu.py", report, program, *flags, ranks=ranks)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    report.unlink()
    assert [line["deterministic"] for line in lines] == ["--deterministic-mode" in flags] * ranks
    assert [line["frozen"] for line in lines] == [
        2 * (program == "pretrain_gpt.py")
    ] * ranks and "leaked" not in done.stderr
    assert [line["findings"] for line in lines] == [[]] * ranks
    return done.stdout, [Counter(line["waits"]) for line in lines]


def losses(log_dir: Path) -> list[float]:
    """Losses of training and of validation, in order."""
    found = [loss for line in metrics(log_dir) for loss in (line["loss"], line.get("validation_loss"))]
    return [loss for loss in found if loss is not None]


@pytest.fixture(scope="module")
def run(model: list[object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four iterations, with offload, evaluations and saves in the background."""
    folder = tmp_path_factory.mktemp("run")
    saves = ["--save", folder / "saved", "--save-interval", 2, "--async-save", "--log-dir", folder / "log"]
    _, [waits] = on_gpu(folder / "report", "pretrain_gpt.py", *model, *TRAINING, *saves)
    assert waits["tolist"] == 4 + 2  # a step or an evaluation
    assert waits["torch.cuda.synchronize"] == 2  # a save's copies
    return folder


@pytest.mark.second
def test_a_resumed_run_has_the_same_losses(run: Path, model: list[object], tmp_path: Path) -> None:
    resumed = ["--load", run / "saved" / "iter_0000002", "--log-dir", tmp_path / "log"]
    _, [waits] = on_gpu(tmp_path / "report", "pretrain_gpt.py", *model, *TRAINING, *resumed)
    assert waits["tolist"] == 2 + 1
    found = losses(tmp_path / "log")
    assert len(found) == 3 and found == losses(run / "log")[-3:]


def test_a_deterministic_run(model: list[object], tmp_path: Path) -> None:
    """`on_gpu` compares torch's setting with the flag."""
    flags = ["--precision", "fp64", "--num-layers", 1, "--global-batch-size", 2, "--train-iters", 1]
    _, [waits] = on_gpu(tmp_path / "report", "pretrain_gpt.py", *model, *flags, "--deterministic-mode")
    assert waits["tolist"] == 1  # the step's one wait


@pytest.mark.slow
def test_other_runs_have_the_same_losses(run: Path, model: list[object], tmp_path: Path) -> None:
    """On two ranks, and on a CPU."""
    more = ["--zero-stage", 3, "--save", tmp_path / "saved", "--log-dir", tmp_path / "two"]
    _, waits = on_gpu(tmp_path / "report", "pretrain_gpt.py", *model, *TRAINING, *more, ranks=2)
    for each in waits:
        assert each["tolist"] == 4 + 2
    done = pretrain(*model, *TRAINING, "--log-dir", tmp_path / "cpu")
    assert done.returncode == 0, done.stderr
    for log_dir in (run / "log", tmp_path / "two"):
        assert losses(log_dir) == pytest.approx(losses(tmp_path / "cpu"), rel=1e-5)


@pytest.mark.slow
def test_a_checkpoint_generates_the_same_text(run: Path, tmp_path: Path) -> None:
    flags = "--prompt", "THE", "--max-new-tokens", 4, "--temperature", 0
    text, _ = on_gpu(tmp_path / "report", "scripts/generate.py", "--load", run / "saved", *flags)
    assert text.startswith("THE")
    assert text == warm("scripts/generate.py", "--load", run / "saved", *flags).stdout
    dealt = *flags, "--context-parallel-size", 2
    assert text == on_gpu(tmp_path / "dealt", "scripts/generate.py", "--load", run / "saved", *dealt, ranks=2)[0]


@pytest.mark.slow
def test_a_benchmark_with_tritons_kernels(tmp_path: Path) -> None:
    """The interpreter runs them. The last loss is that on a CPU, where the benchmark takes the sizes below."""
    sizes = "--layers 2 --hidden 64 --heads 4 --seq-length 32 --vocabulary 311 --batch 2 --precision fp32 --steps 3"
    text, _ = on_gpu(tmp_path / "report", "benchmarks/gpu.py", *sizes.split(), "--systems", "megazero")
    found, wanted = (
        [float(line.split("|")[-2]) for line in each.splitlines() if line.startswith("| megazero |")]
        for each in (text, warm("benchmarks/gpu.py", "--systems", "megazero").stdout)
    )
    assert len(wanted) == 1 and found == pytest.approx(wanted, abs=2e-4)
