"""--decay-from: a branch off a run with a constant learning rate is the run that planned this decay from the start."""

import random
from pathlib import Path
from typing import Any

import pytest

from megazero.flags.cli import read
from tests.end_to_end.cli import metrics, pretrain
from tests.helpers.programs import warm
from tests.reference_run import write_corpus

AT, DECAY = 3, 5  # iterations before the branch, and in it
LR, MIN_LR = 0.0007, 0.00019  # min_lr + (lr - min_lr) is not lr
SHAPE = ["--num-layers", 2, "--hidden-size", 24, "--num-attention-heads", 2, "--seq-length", 11, "--vocab-size", 61]
FLAGS = ["--global-batch-size", 4, "--precision", "fp64", "--lr", LR, "--min-lr", MIN_LR, "--lr-warmup-iters", 2]
SHAPED = ["--lr-wsd-decay-style", "minus_sqrt"]
ZERO, TENSOR = ["--zero-stage", 3], ["--tensor-model-parallel-size", 2, "--zero-stage", 0]


def files(*folders: Path) -> dict[Path, tuple[int, bytes]]:
    found = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in found}


def train(*flags: object) -> str:
    done = pretrain(*SHAPE, *FLAGS, *flags, ranks=2)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def curve(log_dir: Path) -> list[tuple[Any, ...]]:
    return [(r["iteration"], r["consumed_samples"], r["loss"], r["grad_norm"], r["lr"]) for r in metrics(log_dir)]


@pytest.fixture(scope="module")
def stable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with a constant learning rate, which trained past the checkpoint; of a corpus too."""
    folder, draw = tmp_path_factory.mktemp("stable"), random.Random(0)
    write_corpus(folder / "words", "<u2", [[draw.choices(range(61), k=50)] for _ in range(20)])
    saving = ["--save", folder / "run", "--save-interval", AT, "--log-dir", folder / "logs"]
    train(*ZERO, "--data-path", folder / "words", "--train-iters", 2 * AT, *saving)
    return folder


def test_a_branch_is_the_run_that_planned_the_decay(stable: Path, tmp_path: Path) -> None:
    """Bit for bit; and after a stop, with the same command in another layout, to rounding."""
    data, before = ["--data-path", stable / "words", *SHAPED], files(stable)
    planned = ["--lr-decay-style", "wsd", "--train-iters", AT + DECAY, "--lr-wsd-decay-iters", DECAY]
    train(*ZERO, *data, *planned, "--log-dir", tmp_path / "planned")
    wanted = curve(tmp_path / "planned")
    assert [rate for *_, rate in wanted][AT - 1] == LR > wanted[AT][-1] and wanted[-1][-1] == pytest.approx(MIN_LR)

    source = stable / "run" / f"iter_{AT:07d}"
    decays = [*data, "--decay-from", source, "--decay-iters", DECAY]
    said = train(*ZERO, *decays, "--save", tmp_path / "whole", "--log-dir", tmp_path / "whole")
    assert curve(tmp_path / "whole") == wanted[AT:]
    assert f"--decay-from {source} --decay-iters {DECAY}: a branch, with --train-iters {AT + DECAY}" in said
    assert "--lr-decay-style is wsd, and was constant" in said and "To continue as before" not in said
    assert "nothing to do" in train(*ZERO, *decays, "--save", tmp_path / "whole")

    parts = [*decays, "--save", tmp_path / "parts", "--log-dir", tmp_path / "parts"]
    train(*ZERO, *parts, "--exit-interval", AT + 2)
    said = train(*TENSOR, *parts)
    assert f"resuming after iteration {AT + 2}" in said and "the loss curve differs" not in said
    found = curve(tmp_path / "parts")
    assert found[:2] == wanted[AT : AT + 2] and len(found) == DECAY
    for ours, theirs in zip(found, wanted[AT:], strict=True):
        assert ours[:2] == theirs[:2] and ours[2:] == pytest.approx(theirs[2:], rel=1e-10)
    assert files(stable) == before

    again = read(["--preset", str(tmp_path / "parts" / "config.toml")]).config
    assert (again.checkpoint.load, again.training.train_iters) == (str(tmp_path / "parts"), AT + DECAY)


def test_logs_of_the_run_are_kept(stable: Path, tmp_path: Path) -> None:
    """They name other iterations after the branch, and a resume would cut them off."""
    before, source = files(stable), stable / "run" / f"iter_{AT:07d}"
    data, new = ["--data-path", stable / "words"], tmp_path / "new"
    flags = [*data, "--decay-from", source, "--decay-iters", DECAY, "--save", new]
    refused = pretrain(*SHAPE, *FLAGS, *flags, "--log-dir", stable / "logs")
    assert refused.returncode == 1 and f"--log-dir {stable}/logs has the metrics of the run" in refused.stderr
    assert files(stable) == before and not (new / "latest").exists()


@pytest.mark.second
def test_a_merge_begins_a_new_run(stable: Path, tmp_path: Path) -> None:
    """A resume from it reports the reason and the way out."""
    paths = [stable / "run" / f"iter_{at:07d}" for at in (AT, 2 * AT)]
    done = warm("scripts/checkpoint.py", "merge", "--weights", "-0.5,1.5", tmp_path / "merged", *paths)
    assert done.returncode == 0, done.stderr
    merged = ["--data-path", stable / "words", "--load", tmp_path / "merged", "--train-iters", 2]
    said = train(*TENSOR, *merged, "--log-dir", tmp_path / "logs")
    alone = "iter_0000000 has weights alone, because it was imported, upcycled or merged: a new run begins with them"
    assert alone in said and curve(tmp_path / "logs")[0][:2] == (1, 4)
    assert "has weights alone" not in train(*ZERO, *merged, "--finetune")
