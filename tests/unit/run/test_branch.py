"""--decay-from: its flags, and the checkpoints and folders that it refuses."""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megazero import checkpoint
from megazero.checkpoint.shards import LocalShard
from megazero.flags.cli import read
from megazero.flags.config import Config, ModelConfig
from megazero.flags.validate import check_values
from megazero.run.resume import find_checkpoint
from megazero.run.run_state import RunState

MODEL = ModelConfig(2, 24, 0, 2, 11, 61)
STABLE = {"lr": 0.002, "lr_warmup_iters": 2, "lr_decay_iters": 9}


def write(root: Path, iteration: int, optimizer: dict[str, Any] = STABLE, **changes: Any) -> Path:
    groups = {"optimizer": optimizer, "log": {"log_dir": str(root / "logs")}} | changes.pop("groups", {})
    state = RunState(iteration, 4 * iteration, iteration, None, asdict(MODEL), {}, groups)
    tensor = LocalShard((3,), (0,), (3,), 0, 3, torch.ones(3))
    return checkpoint.save(root, iteration, {"model.w": tensor}, replace(state, **changes).to_json())


def flags(source: Path | str, save: Path | str, *more: str) -> list[str]:
    return ["--decay-from", str(source), "--decay-iters", "4", "--save", str(save), "--lr", "0.002", *more]


def branched(*argv: Any) -> Config:
    config = read(flags(*argv)).config
    check_values(config)
    return replace(config, model=MODEL)


def test_its_flags_are_those_of_a_run_that_decays(tmp_path: Path) -> None:
    preset = tmp_path / "run.toml"
    preset.write_text('train-iters = 900\nlr-decay-style = "cosine"\nlr-decay-iters = 800\nload = "runs/b"\n')
    command = read(flags("runs/a/iter_0000005", "runs/a/decay", "--preset", str(preset)))
    config = command.config
    check_values(config)
    found = config.checkpoint.load, config.training.train_iters, config.optimizer.lr_decay_style
    assert found == ("runs/a/decay", 9, "wsd")
    assert (config.optimizer.lr_decay_iters, config.optimizer.lr_wsd_decay_iters) == (9, 4)
    assert command.notes == [
        "--decay-from runs/a/iter_0000005 --decay-iters 4: a branch, with --train-iters 9 --lr-decay-style wsd "
        "--lr-decay-iters 9 --lr-wsd-decay-iters 4; it resumes from runs/a/decay"
    ]


def test_it_begins_once_and_then_resumes(tmp_path: Path) -> None:
    source, own = write(tmp_path / "run", 5), tmp_path / "branch"
    config = branched(source, own)
    assert find_checkpoint(config) == source
    newer = write(own, 6, groups={"checkpoint": {"decay_from": str(source)}})
    assert find_checkpoint(config) == newer
    (source / "manifest.json").unlink()  # pruned, for example
    assert find_checkpoint(config) == newer


def test_refusals(tmp_path: Path) -> None:
    run = tmp_path / "run"
    source, new = write(run, 5), tmp_path / "new"
    wsd = STABLE | {"lr_decay_style": "wsd", "lr_wsd_decay_iters": 4}
    write(run, 1)  # in its warm-up
    write(run, 7, wsd)
    alone = write(tmp_path / "alone", 0, {}, weights_only=True)
    other, branch = tmp_path / "other", tmp_path / "branch"
    write(other, 3)
    write(branch, 6, groups={"checkpoint": {"decay_from": str(run / "iter_0000004")}})
    wide = replace(MODEL, hidden_size=48)
    rows: list[tuple[Callable[[], object], str]] = [
        (lambda: branched(run, new), f"--decay-from {run} is not a checkpoint; name one"),
        (lambda: branched(source, run), "--save .*run is the folder of --decay-from .*iter_0000005"),
        (lambda: branched(source, source), "--save .*iter_0000005 is the folder of --decay-from"),
        (
            lambda: branched(source, new, "--train-iters", "9"),
            "--train-iters and --decay-from .*leave out --train",
        ),
        (lambda: branched(source, new, "--load", "x"), "--load and --decay-from .*; leave out --load"),
        (lambda: branched(source, new, "--finetune"), "--finetune and --decay-from"),
        (lambda: branched(source, new, "--lr-decay-style", "linear"), "--lr-decay-style and --decay-from"),
        (lambda: find_checkpoint(branched(run / "iter_0000004", new)), "^--decay-from .*4 is not a .*no such folder"),
        (
            lambda: find_checkpoint(branched(run / "iter_0000001", new)),
            "there is 0.001, .* --lr 0.002: it warms up",
        ),
        (lambda: find_checkpoint(branched(run / "iter_0000007", new)), "rate there is .*or decays already"),
        (
            lambda: find_checkpoint(branched(source, new, "--lr", "0.003")),
            "and --lr is 0.003; give --lr 0.002",
        ),
        (lambda: find_checkpoint(branched(alone, new)), "--decay-from .*0000 has weights alone"),
        (lambda: find_checkpoint(branched(source, new, "--log-dir", f"{run}/logs")), "--log-dir .* has the metrics of"),
        (lambda: find_checkpoint(branched(source, other)), "--save .*other holds iter_0000003 of another run"),
        (lambda: find_checkpoint(branched(source, branch)), "iter_0000006 of the branch off .*4, not off"),
        (
            lambda: find_checkpoint(replace(branched(source, new), model=wide)),
            "another model: .*-size 24, not 48",
        ),
    ]
    for call, message in rows:
        with pytest.raises(ValueError, match=message):
            call()
    assert find_checkpoint(branched(source, run / "decay", "--log-dir", f"{run}/decay")) == source
