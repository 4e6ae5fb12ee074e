"""Loading and saving of a run: guard and lock of --save, pruning, replaced corpora, bad folders."""

import errno
import fcntl
import itertools
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from megazero import checkpoint
from megazero.checkpoint.folders import PARTIAL
from megazero.checkpoint.in_memory import run_folder
from megazero.checkpoint.locking import SaveLock, Taken
from megazero.checkpoint.shards import LocalShard
from megazero.data.corpora import parse_data_path
from megazero.data.fingerprint import fingerprint
from megazero.data.writer import IndexedWriter
from megazero.families import TRAITS
from megazero.flags.cli import parse
from megazero.flags.config import CheckpointConfig, Config, DataConfig, EvaluationConfig, LogConfig, ModelConfig
from megazero.flags.validate import check_values
from megazero.run.changes import changed_options
from megazero.run.exports import guard_exports
from megazero.run.resume import check_data, find_checkpoint, takes_memory
from megazero.run.run_state import Progress, RunState, is_hugging_face
from megazero.run.stopping import stopped_words
from megazero.run.trainer import Trainer
from megazero.world import STARTED, Generation
from tests.helpers.table import for_each

STATE = RunState(1, 8, 1, None, asdict(ModelConfig()), {}, {}, run="ours")


def prints(config: Config) -> tuple[str, ...]:
    """The fingerprints of a run's corpora."""
    return tuple(fingerprint(prefix) for _, prefix in parse_data_path(config.data.data_path))


def save(root: Path, iteration: int, run: str = "ours", **changes: Any) -> Path:
    tensor = LocalShard((3,), (0,), (3,), 0, 3, torch.full((3,), float(iteration)))
    state = replace(STATE, iteration=iteration, run=run, **changes).to_json()
    return checkpoint.save(root, iteration, {"model.w": tensor}, state)


def config(**options: Any) -> Config:
    return replace(Config(), checkpoint=CheckpointConfig(**{k: str(v) for k, v in options.items()}))


# -- the guard of --save


def test_saving_where_another_run_saved_is_refused(tmp_path: Path) -> None:
    ours, other = tmp_path / "ours", tmp_path / "other"
    mine = save(ours, 1)
    save(other, 5)
    for load in (ours, mine):
        with pytest.raises(
            ValueError, match=r"--save .*other holds iter_0000005 of an earlier run, and --load .* loads"
        ):
            find_checkpoint(config(load=load, save=other))
    with pytest.raises(ValueError, match=r"--load .*typo holds no checkpoint; --load .*other resumes it"):
        find_checkpoint(config(load=tmp_path / "typo", save=other))
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text("{}")
    theirs = config(load=tmp_path / "theirs", save=other)
    with pytest.raises(ValueError, match=r"--load .*theirs holds no checkpoint; --load .*other resumes it"):
        find_checkpoint(theirs)
    assert find_checkpoint(config(load=tmp_path / "theirs", save=tmp_path / "new")) == tmp_path / "theirs"
    with pytest.raises(ValueError, match=r"add --load .*other to resume it"):
        find_checkpoint(config(save=other))


def test_saving_into_a_new_folder_or_the_loaded_one_is_not(tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    mine = save(ours, 1)
    (tmp_path / "link").symlink_to(ours)
    (tmp_path / "empty").mkdir()
    for load, where in ((ours, ours), (mine, ours), (ours, tmp_path / "link"), (ours, tmp_path / "empty")):
        assert find_checkpoint(config(load=load, save=where)).resolve() == mine
    assert find_checkpoint(config(load=tmp_path / "new", save=tmp_path / "new")) is None


def test_a_folder_is_itself_in_every_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume may spell --save and --load differently; the run is the same."""
    ours = tmp_path / "runs" / "ours"
    mine = save(ours, 1)
    (tmp_path / "link").symlink_to(ours)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "link").symlink_to(tmp_path / "runs")
    (tmp_path / "exports" / "iter_0000001").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "deep")
    beside = tmp_path / "runs" / "ours2"
    beside.mkdir()
    exports = str(tmp_path / "exports")
    spellings = [
        str(ours), f"{ours}/", f"{ours}//", f"{ours}/.", f"{ours}/../ours", "../runs/ours", "./link/ours",
        f"{tmp_path}/link/", "link/../runs/ours",
    ]  # fmt: skip
    for where in spellings:
        for load in (str(ours), f"{mine}/", "link/ours"):
            options = CheckpointConfig(load=load, save=where, save_hf=exports, memory_checkpoint_interval=1)
            same = replace(Config(), checkpoint=options)
            found = find_checkpoint(same)
            assert found is not None and found.resolve() == mine, (load, where)
            guard_exports(options, found)
            if not load.endswith("1/"):
                assert takes_memory(same), (load, where)
                assert stopped_words(1, "SIGINT", options).endswith("; the same command resumes it")
        assert run_folder("", where) == run_folder("", str(ours)) != run_folder("", str(beside)), where
        with pytest.raises(ValueError, match="is the folder of --save"):
            check_values(replace(Config(), checkpoint=CheckpointConfig(save=where, save_hf="link/ours/")))


def test_a_load_that_is_not_there_is_refused_unless_it_is_save_too(tmp_path: Path) -> None:
    typo, there = str(tmp_path / "tpyo"), tmp_path / "there"
    there.mkdir()
    refused = (CheckpointConfig(load=typo), CheckpointConfig(load=typo, save=str(there)))
    for options in refused:
        with pytest.raises(
            ValueError, match=rf"--load .*tpyo: there is no such folder, only {tmp_path}; correct it, or"
        ):
            find_checkpoint(replace(Config(), checkpoint=options))
    begins = [
        CheckpointConfig(load=typo, save=f"{tmp_path}/./tpyo"),
        CheckpointConfig(load=str(there), save=f"{tmp_path}/there/../there"),
        CheckpointConfig(),
    ]
    for options in begins:
        assert find_checkpoint(replace(Config(), checkpoint=options)) is None


def test_runs_that_may_resume_from_memory_or_from_a_hugging_face_folder(tmp_path: Path) -> None:
    options = CheckpointConfig(save=str(tmp_path), load=f"{tmp_path}/.", memory_checkpoint_interval=1)
    changes: tuple[tuple[dict[str, Any], bool], ...] = (
        ({}, True),
        ({"memory_checkpoint_interval": 0}, False),
        ({"finetune": True}, False),
        ({"load": ""}, False),
        ({"load": str(tmp_path / "other")}, False),
    )
    for change, wanted in changes:
        assert takes_memory(replace(Config(), checkpoint=replace(options, **change))) == wanted, change
    assert not takes_memory(replace(Config(), checkpoint=options, evaluation=EvaluationConfig(eval_only=True)))
    assert not is_hugging_face(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert is_hugging_face(tmp_path)
    (tmp_path / "latest").write_text("iter_0000001")
    assert not is_hugging_face(tmp_path)


def test_a_folder_with_nothing_to_load_is_refused(tmp_path: Path) -> None:
    """Such as a hub cache whose blobs are gone: its config.json is a link to a missing file."""
    folder, where = tmp_path / "theirs", rf"--load {tmp_path}/theirs has nothing to load, neither .*\. It holds "
    folder.mkdir()
    with pytest.raises(ValueError, match=where + r"nothing\. Name .* or leave out --load"):
        find_checkpoint(config(load=folder))
    for name in ("README.md", "tokenizer.json"):
        (folder / name).touch()
    (folder / "config.json").symlink_to(tmp_path / "blobs" / "1234")
    for save in ("", tmp_path / "run"):
        with pytest.raises(
            ValueError, match=where + "config.json, a link to a missing file; README.md; tokenizer.json[.]"
        ):
            find_checkpoint(config(load=folder, save=save))
    (folder / "more").touch()
    (folder / "most").touch()
    with pytest.raises(ValueError, match=r"README\.md; more; most; \.\.\.\. Name"):
        find_checkpoint(config(load=folder))


# A file of a checkpoint of each system -> its name in messages. None: it may be a model to load.
OTHERS: dict[tuple[str, ...], str] = {
    ("iter_0000100/mp_rank_00/model_optim_rng.pt", "latest_checkpointed_iteration.txt"): "Megatron-LM (iter_0000100/mp",
    ("release/mp_rank_00_000/model_optim_rng.pt",): "Megatron-LM (release/mp",
    ("latest_checkpointed_iteration.txt",): "Megatron-LM (latest",
    ("iter_0000100/.metadata", "iter_0000100/metadata.json", "iter_0000100/__0_0.distcp"): "Megatron-LM (torch_dist)",
    ("iter_0000100/common.pt", "iter_0000100/.metadata"): "Megatron-LM (torch_dist)",
    ("latest=global_step10", "global_step10/mp_rank_00_model_states.pt"): "DeepSpeed (global_step10/mp",
    ("latest=v3", "v3/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"): "DeepSpeed (v3/bf16",
    ("zero_pp_rank_0_mp_rank_00_model_states.pt",): "DeepSpeed (zero_pp",
    ("latest=global_step10", "zero_to_fp32.py"): "DeepSpeed (zero_to_fp32.py",
    ("latest_universal=s", "s/zero/model.weight/fp32.pt", "s/mp_rank_00_model_states.pt"): "universal checkpoint",
    ("step-10/.metadata", "step-10/__0_0.distcp"): "PyTorch (DCP) (step-10",
    (".metadata", "__0_0.distcp"): "PyTorch (DCP) (.metadata",
    ("checkpoint-500/trainer_state.json", "checkpoint-500/config.json"): "transformers' Trainer",
    ("checkpoint-5/global_step5/mp_rank_00_model_states.pt", "checkpoint-5/optimizer.pt"): "transformers' Trainer",
    ("model.safetensors", "random_states_0.pkl"): "Accelerate",
    ("epoch=0-step=10.ckpt",): "PyTorch Lightning",
    ("version_0/checkpoints/last.ckpt",): "PyTorch Lightning",
    ("consolidated.00.pth", "params.json"): "torch.save",
    ("ckpt.pt",): "torch.save",
    ("10/_CHECKPOINT_METADATA",): "Orbax",
    ("model.nemo",): "NeMo",
}


def contents(root: Path) -> dict[str, str]:
    return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}


def filled(root: Path, files: tuple[str, ...]) -> Path:
    for name, _, text in (file.partition("=") if not file.startswith("epoch") else (file, "", "") for file in files):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@for_each(("files", "name"), OTHERS.items())
def test_checkpoints_of_other_systems_are_named_and_never_written_among(
    files: tuple[str, ...], name: str, tmp_path: Path
) -> None:
    """The folder is both --load and --save, as of a command that resumes; each alone; of exports; of copies."""
    theirs, new = filled(tmp_path / "theirs", files), tmp_path / "new"
    before = contents(theirs)
    for options in ({"load": theirs, "save": theirs}, {"load": theirs}, {"load": theirs, "save": new}):
        with pytest.raises(ValueError, match=rf"--load .*theirs has .*{re.escape(name)}.*Hugging Face") as refused:
            find_checkpoint(config(**options))
        assert not isinstance(refused.value, checkpoint.Damaged)
    for flag in ("save", "save_hf", "memory_checkpoint_dir"):
        with pytest.raises(ValueError, match=rf"--{flag.replace('_', '-')} .*theirs has .*{re.escape(name)}"):
            find_checkpoint(config(**{"save": new, flag: theirs}))
    assert contents(theirs) == before


@for_each(
    "name", ["vectors.pt", "best.pth", "hidden_states.pt", "logits/common.pt", "pt/x.pt", "common.pt", "x.pt.zip"]
)
def test_a_file_of_tensors_is_no_checkpoint_of_another_system(name: str, tmp_path: Path) -> None:
    """A run begins next to it, and --load of such a folder has nothing to load."""
    folder = filled(tmp_path / "mine", (name,))
    for options in ({"save": folder}, {"load": folder, "save": folder}, {"save": folder, "save_hf": folder}):
        assert find_checkpoint(config(**options)) is None
    with pytest.raises(ValueError, match=r"--load .*mine has nothing to load"):
        find_checkpoint(config(load=folder, save=tmp_path / "new"))


def test_a_hugging_face_folder_is_loaded_and_never_saved_into(tmp_path: Path) -> None:
    theirs = filled(tmp_path / "theirs", ("config.json={}", "model.safetensors", "latest=global_step10"))
    assert find_checkpoint(config(load=theirs, save=tmp_path / "new")) == theirs
    for load in ("", theirs):
        with pytest.raises(ValueError, match=r"--save .*theirs has a Hugging Face model \(config.json\)"):
            find_checkpoint(config(load=load, save=theirs))
    exports = filled(tmp_path / "exports", ("iter_0000100/config.json={}", "iter_0000100/model.safetensors"))
    with pytest.raises(ValueError, match=r"--save .*exports has a Hugging Face model \(iter_0000100/config.json\)"):
        find_checkpoint(config(save=exports))
    mine = save(tmp_path / "ours", 100)
    assert find_checkpoint(config(load=mine.parent, save=mine.parent, save_hf=exports)) == mine
    with pytest.raises(ValueError, match=r"--save-hf .*theirs has a Hugging Face model \(config.json\)"):
        find_checkpoint(config(load=mine.parent, save=mine.parent, save_hf=theirs))
    with pytest.raises(ValueError, match=r"iter_0000100: it is a Hugging Face model"):
        find_checkpoint(config(load=exports))


def test_files_of_other_systems_among_our_checkpoints(tmp_path: Path) -> None:
    """A run continues there, unless a save would replace one of theirs. A file may be named instead of its folder."""
    mine = save(tmp_path / "ours", 8)
    filled(tmp_path / "ours", ("best.pt", "global_step10/mp_rank_00_model_states.pt"))
    assert find_checkpoint(config(load=mine.parent, save=mine.parent)) == mine
    filled(tmp_path / "ours", ("iter_0000100/mp_rank_00/model_optim_rng.pt",))
    assert find_checkpoint(config(load=mine.parent, save=tmp_path / "new")) == mine
    with pytest.raises(ValueError, match=r"--save .*ours has .*Megatron-LM \(iter_0000100/mp_rank_00/model"):
        find_checkpoint(config(load=mine.parent, save=mine.parent))
    with pytest.raises(ValueError, match=r"--load .*best.pt has a file of torch.save \(best.pt\)"):
        find_checkpoint(config(load=tmp_path / "ours" / "best.pt"))
    with pytest.raises(ValueError, match=r"--load .*iter_0000100 has a checkpoint of Megatron-LM \(mp_rank_00/model"):
        find_checkpoint(config(load=tmp_path / "ours" / "iter_0000100"))


def test_a_latest_that_names_no_checkpoint_of_ours_starts_no_run(tmp_path: Path) -> None:
    """Neither from random weights, nor over the file."""
    filled(tmp_path, ("latest=v3", "notes.txt"))
    with pytest.raises(ValueError, match=r"has no checkpoint, and .*latest is damaged: .*'v3'; name another"):
        find_checkpoint(config(load=tmp_path, save=tmp_path))
    with pytest.raises(ValueError, match=r"--save .*'v3'; a save would replace this file: name another folder"):
        find_checkpoint(config(save=tmp_path))


def test_a_latest_that_is_a_link_means_its_target(tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    for iteration in (4, 8):
        save(ours, iteration)
    (ours / "latest").unlink()
    (ours / "latest").symlink_to("iter_0000004")
    assert find_checkpoint(config(load=ours)) == ours / "iter_0000004"
    save(ours, 9)  # replaces the link, and not its target
    assert (ours / "latest").read_text() == "iter_0000009\n" and (ours / "iter_0000004").is_dir()
    (ours / "latest").unlink()
    (ours / "latest").symlink_to(ours / "iter_0000006")  # a target that is gone: the checkpoint before it
    assert find_checkpoint(config(load=ours)) == ours / "iter_0000004"
    (ours / "latest").unlink()
    (ours / "latest").symlink_to(save(tmp_path / "other", 6))
    with pytest.raises(ValueError, match=r"--load .*ours: `latest` is a link to .*other/iter_0000006; --load that"):
        find_checkpoint(config(load=ours))


def test_a_checkpoint_by_another_name_is_refused_with_its_name(tmp_path: Path) -> None:
    for name in ("best", "iter_8", "iter_0000008.bak"):
        save(tmp_path, 8).rename(tmp_path / name)
        for options in ({"load": tmp_path / name}, {"load": tmp_path / name, "save": tmp_path / name}):
            with pytest.raises(ValueError, match=rf"--load .*{name} is a checkpoint of iteration 8, .* iter_0000008"):
                find_checkpoint(config(**options))


def test_a_latest_that_is_a_folder_loses_no_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 1)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest" / "full").mkdir(parents=True)
    save(tmp_path, 2)
    assert "latest is no file, and does not name iter_0000002, which is saved; delete or move it" in caplog.text
    assert find_checkpoint(config(load=tmp_path)) == tmp_path / "iter_0000002"
    with pytest.raises(checkpoint.Damaged):  # it cannot be known which are abandoned
        checkpoint.prune(tmp_path, 1, run="ours")
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["iter_0000001", "iter_0000002"]


def test_a_damaged_state_falls_back_and_an_exact_load_does_not(tmp_path: Path) -> None:
    older, newer = save(tmp_path, 1), save(tmp_path, 2)
    for each in (newer, save(tmp_path, 3), save(tmp_path, 4)):  # of several, each is passed over once
        (each / "state.json").write_bytes(b" " + (each / "state.json").read_bytes())
    assert find_checkpoint(config(load=tmp_path)) == older
    shutil.rmtree(tmp_path / "iter_0000003")
    shutil.rmtree(tmp_path / "iter_0000004")
    (tmp_path / "latest").write_text("iter_0000002\n")
    exact = replace(Config(), checkpoint=CheckpointConfig(load=str(tmp_path), load_exact=True))
    for refused in (exact, config(load=newer)):
        with pytest.raises(checkpoint.Damaged, match=r"iter_0000002.*state.json.*checksum"):
            find_checkpoint(refused)


def test_a_checkpoint_that_another_run_prunes_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Delete it before its state is read, as a run with --keep-last 1 does when it has saved a newer one."""
    save(tmp_path, 1)
    read, calls = RunState.read, []

    def late(path: Path, group: Any = None) -> RunState:
        calls.append(path.name)
        if len(calls) == 1:
            save(tmp_path, 2)
            checkpoint.prune(tmp_path, 1, run="ours")
        return read(path, group)

    monkeypatch.setattr(RunState, "read", late)
    assert find_checkpoint(config(load=tmp_path)) == tmp_path / "iter_0000002"
    assert calls == ["iter_0000001", "iter_0000002"]


# -- the lock


def forked(body: Callable[[], None]) -> int:
    """A process of its own that runs `body` and ends with exit code 0, or 1 if it raises."""
    child = os.fork()
    if child == 0:
        try:
            body()
            os._exit(0)
        finally:
            os._exit(1)
    return child


def test_a_second_run_in_one_folder_is_refused_and_a_crash_leaves_no_lock(tmp_path: Path) -> None:
    reader, writer = os.pipe()

    def hold() -> None:
        lock = SaveLock(tmp_path)
        os.write(writer, b"held")
        signal.pause()
        lock.release()

    holder = forked(hold)
    try:
        assert os.read(reader, 4) == b"held"
        with pytest.raises(ValueError, match=rf"--save {tmp_path} is in use by process {holder} on .*since"):
            SaveLock(tmp_path)
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    SaveLock(tmp_path).release()


def test_a_lock_that_fails_refuses_the_run_unless_the_file_system_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def lock_with(number: int) -> None:
        def lockf(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "lockf", lockf)
        SaveLock(tmp_path).release()

    with pytest.raises(ValueError, match=rf"^--save {tmp_path}: Input/output error$"):
        lock_with(errno.EIO)
    assert capfd.readouterr().err == ""
    lock_with(errno.ENOLCK)
    assert f"WARNING: --save {tmp_path}: this file system has no locks" in capfd.readouterr().err


def test_a_forked_process_neither_holds_nor_drops_the_lock(tmp_path: Path) -> None:
    lock = SaveLock(tmp_path)
    os.waitpid(forked(lambda: None), 0)  # closes its copy of the descriptor

    def probe() -> None:
        with pytest.raises(ValueError, match="in use by process"):
            SaveLock(tmp_path)

    assert os.waitpid(forked(probe), 0)[1] == 0
    worker = forked(signal.pause)
    try:
        lock.release()
        SaveLock(tmp_path).release()
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)


def test_a_lock_notices_that_its_folder_is_not_its_own_any_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Moved, deleted, or without its lock file it is locked again, unless another run has begun there."""
    root, away = tmp_path / "s", tmp_path / "away"
    lock = SaveLock(root)
    save(root, 1)
    lock.keep()
    assert not caplog.text
    (root / ".lock").unlink()
    lock.keep()  # the checkpoints are its own
    root.rename(away)
    lock.keep()
    assert caplog.text.count(f"--save {root} has lost the lock of this run") == 2
    reader, writer = os.pipe()

    def hold() -> None:
        for where in (root, tmp_path / "new"):
            with suppress(ValueError):
                SaveLock(where)
                os.write(writer, where.name.encode())
        signal.pause()

    root.rename(tmp_path / "away again")
    holder = forked(hold)
    try:
        assert os.read(reader, 1) == b"s"
        with pytest.raises(Taken, match=rf"--save {root} .* another run .*process {holder} on"):
            lock.keep()
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
    with pytest.raises(Taken, match="another run"):  # it has ended: its folder is not ours
        lock.keep()
    (root / ".owner").unlink()
    save(root, 9)
    with pytest.raises(Taken, match="another run"):  # of an earlier version
        lock.keep()
    lock.release()


# -- a later generation, while the process of an earlier one is frozen

CHANGES = ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "shutil.rmtree")


def start_generation(number: int) -> None:
    os.environ |= {STARTED: "1700000000.5", "MEGAZERO_GENERATION": str(number)}


def wait_at(change: int, reached: int, gate: int) -> None:
    """Write to the pipe `reached` just before change number `change` of a folder, or creation of a file; then wait.

    A byte from the pipe `gate` ends the wait. A frozen process would be mistaken for one that another process stops.
    """
    left = [change]

    def watch(event: str, details: tuple[Any, ...]) -> None:
        created = event == "open" and isinstance(details[2], int) and details[2] & os.O_CREAT
        if (event in CHANGES or created) and left[0] >= 0:
            left[0] -= 1
            if left[0] < 0:
                os.write(reached, b"frozen")
                os.read(gate, 1)

    sys.addaudithook(watch)


def content(root: Path) -> dict[str, bytes]:
    """All files but partial ones. A replaced checkpoint counts under its own name, because a resume finds both."""
    files = [path for path in root.rglob("*") if path.is_file() and PARTIAL not in str(path)]
    return {re.sub(r"/\.(iter_\d+)\.replaced/", r"/\1/", str(path)): path.read_bytes() for path in files}


@pytest.mark.second
@pytest.mark.parametrize(
    ("idle", "first"),
    [(True, 0), (False, 1), *(pytest.param(idle, int(idle), marks=pytest.mark.slow) for idle in (False, True))],
)
def test_a_frozen_process_of_an_earlier_generation_changes_nothing_later(
    idle: bool, first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is frozen before each change that a start, two saves and a pruning make, and runs on later.

    Until then the later generation has taken the lock; unless `idle`, it has also saved, and is in the next save.

    first: number of the first change; every second one is tried.
    """
    monkeypatch.setenv(STARTED, "")
    monkeypatch.setenv("MEGAZERO_GENERATION", "")
    frozen, number = True, first
    while frozen:
        root = tmp_path / str(number)
        reader, writer = os.pipe()
        gate, opener = os.pipe()

        def earlier(root: Path = root, at: int = number, writer: int = writer, gate: int = gate) -> None:
            start_generation(0)
            locks = [checkpoint.lock(root)]
            save(root, 1)
            save(root, 2)
            start_generation(1)
            try:
                wait_at(at, writer, gate)
                locks.append(checkpoint.lock(root))
                save(root, 3)
                save(root, 2)
                checkpoint.prune(root, 1, run="ours")
            except ValueError as error:
                os.write(writer, str(error).encode())

        child = forked(earlier)
        os.close(writer)
        try:
            frozen = os.read(reader, 6) == b"frozen"  # else all changes are made, and the process has ended
            if frozen:
                start_generation(2)
                lock = checkpoint.lock(root)  # at once
                assert lock is not None and checkpoint.find(root) is not None
                for iteration in () if idle else (2, 4):
                    save(root, iteration, updates=7)
                checkpoint.prune(root, 0 if idle else 3, run="ours")
                saving = checkpoint.folders.partial_folder(root, 3) / "rank_00000.safetensors"
                saving.parent.mkdir()
                saving.write_bytes(b"ours")
                before = content(root)
                os.write(opener, b".")
                refusal = os.read(reader, 1000)
                os.waitpid(child, 0)
                assert refusal.startswith(b"--save "), number
                assert content(root) == before and saving.read_bytes() == b"ours", number
                lock.release()
            else:
                os.waitpid(child, 0)
        finally:
            for pipe in (reader, gate, opener):
                os.close(pipe)
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        number += 2
    assert number > 30


@for_each("text", [b"{}", b'["a", 0, 1]', b"\0x"])
def test_a_damaged_owner_refuses_the_run_with_a_way_out(text: bytes, tmp_path: Path) -> None:
    owner = tmp_path / ".owner"
    owner.write_bytes(text)
    with pytest.raises(ValueError, match=rf"^--save {tmp_path}: {owner}: .*; if no other run saves there, delete this"):
        SaveLock(tmp_path)
    owner.unlink()
    SaveLock(tmp_path).release()


@for_each("generation", [None, 3])
@for_each("text", [b"", b"\0" * 40])
def test_an_owner_that_a_power_cut_emptied_names_nobody(
    text: bytes, generation: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start takes the folder. A process that is running refuses, because it cannot know who saves there."""
    if generation is not None:
        monkeypatch.setattr("megazero.checkpoint.locking.this_generation", lambda: Generation("run", generation))
    (tmp_path / ".owner").write_bytes(text)
    SaveLock(tmp_path).release()
    assert (tmp_path / ".owner").read_bytes().strip(b"\0")
    (tmp_path / ".owner").write_bytes(text)
    with nullcontext() if generation is None else pytest.raises(ValueError, match="if no other run saves there"):
        checkpoint.folders.check_owner(tmp_path)


def test_who_saves_after_whom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generation takes the lock from an earlier one of its run alone."""
    monkeypatch.setenv("MEGAZERO_GENERATION", "3")
    monkeypatch.setenv(STARTED, "1")
    lock = SaveLock(tmp_path)
    for run, generation, refusal in (("1", "2", "by generation 3"), ("1", "3", "by process"), ("2", "4", "by process")):

        def other(run: str = run, generation: str = generation, refusal: str = refusal) -> None:
            os.environ |= {STARTED: run, "MEGAZERO_GENERATION": generation}
            with pytest.raises(ValueError, match=f"--save {tmp_path} is in use {refusal}"):
                SaveLock(tmp_path)

        assert os.waitpid(forked(other), 0)[1] == 0, generation
        checkpoint.folders.check_owner(tmp_path)
    lock.release()
    monkeypatch.delenv(STARTED)
    SaveLock(tmp_path).release()  # a run without generations
    monkeypatch.setenv(STARTED, "1")
    with pytest.raises(ValueError, match=r"by generation 0 of a run"):
        save(tmp_path, 1)
    assert not [*tmp_path.glob("*iter*")]


# -- pruning


def names(root: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in root.glob("iter_*"))


def test_only_this_runs_checkpoints_are_pruned(tmp_path: Path) -> None:
    save(tmp_path, 1, run="theirs")
    for iteration in (2, 3, 4):
        save(tmp_path, iteration)
    checkpoint.prune(tmp_path, 1, run="ours")
    assert names(tmp_path) == [1, 4]


def test_keep_every(tmp_path: Path) -> None:
    """--keep-every."""
    for iteration in range(1, 8):
        save(tmp_path, iteration)
    checkpoint.prune(tmp_path, 2, 3, "ours")
    assert names(tmp_path) == [3, 6, 7]


def test_the_last_sound_checkpoint_is_never_pruned(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    for iteration in (3, 4, 5):
        save(tmp_path, iteration, sound=False, skipped_in_a_row=iteration)
    checkpoint.prune(tmp_path, 1, run="ours")
    assert names(tmp_path) == [2, 5]


def test_only_whole_checkpoints_count(tmp_path: Path) -> None:
    for iteration in (1, 2, 3, 4):
        save(tmp_path, iteration)
    (tmp_path / "iter_0000003" / "manifest.json").unlink()
    checkpoint.prune(tmp_path, 2, run="ours")
    assert names(tmp_path) == [2, 3, 4]


# -- the corpus


def corpus(prefix: Path, first: int) -> str:
    with IndexedWriter(prefix, np.uint16, {"tokenizer": "byte", "vocab_size": 257}) as writer:
        writer.add(np.arange(first, first + 100))
    return str(prefix)


def test_a_corpus_made_anew_under_the_same_name_is_refused(tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "corpus", 0)
    ours = replace(Config(), data=DataConfig(data_path=(prefix,)))
    state = replace(STATE, config=json.loads(json.dumps(asdict(ours))), fingerprints=prints(ours))
    check_data(Path("iter"), state, ours, prints(ours))
    corpus(tmp_path / "corpus", 1)
    with pytest.raises(
        ValueError, match=rf"--load iter: --data-path {prefix} holds other tokens than when this was saved"
    ):
        check_data(Path("iter"), state, ours, prints(ours))
    corpus(tmp_path / "corpus", 0)
    saved = asdict(ours)
    del saved["data"]["split_by"]  # as it was before that flag: samples must not change in silence
    older, files = replace(state, config=saved), prints(ours)
    check_data(Path("iter"), older, ours, files)
    check_data(Path("iter"), state, ours, files, (prefix,))
    with pytest.raises(ValueError, match=rf"--load iter was saved when .*{prefix}.*add --split-by documents"):
        check_data(Path("iter"), older, ours, files, (prefix,))
    for given in ("documents", "tokens"):
        check_data(Path("iter"), older, replace(ours, data=replace(ours.data, split_by=given)), files, (prefix,))
    other = replace(Config(), data=DataConfig(data_path=(corpus(tmp_path / "other", 1),)))
    check_data(Path("iter"), state, other, prints(other))  # the user's choice, and reported:
    (warning,) = changed_options(state, other, fingerprints=prints(other)).warnings
    assert warning == (
        f"--data-path is {other.data.data_path[0]}, and was {prefix} when this was saved: training continues at sample "
        "8 of the new data, and the loss curve differs from here; with --finetune and another --save, a new run begins "
        "with these weights at sample 0"
    )
    # the same tokens in another folder are no other data, unless their weights differ
    moved = replace(Config(), data=DataConfig(data_path=(corpus(tmp_path / "moved place", 0),)))
    found = changed_options(state, moved, fingerprints=prints(moved))
    assert found.notes == [f"--data-path is '{tmp_path}/moved place', and was {prefix} when this was saved"]
    assert found.warnings == []
    weighted = replace(Config(), data=DataConfig(data_path=("0.3", prefix)))
    assert "0.3 " in changed_options(state, weighted, fingerprints=prints(weighted)).warnings[0]


def test_the_traits_of_earlier_states_are_those_of_their_family() -> None:
    """They had the family's name, and auto as the activation."""
    ours = parse("--architecture gemma2 --vocab-size 9".split())
    older = {name: v for name, v in asdict(ours.model).items() if name not in TRAITS} | {"activation": "auto"}
    state = replace(STATE, model=older, config={"model": older})
    assert state.typed_model(Path("iter")) == ours.model
    assert changed_options(state, ours) == ([], [])
    changed = changed_options(state, replace(ours, model=replace(ours.model, activation="relu", norm_place="after")))
    assert "--activation is relu, and was geglu-tanh; --norm-place is after, and was around when" in changed.warnings[0]


def test_options_that_change_the_curve_are_warnings() -> None:
    """One for each consequence, with the flags that restore the curve; a learning rate only if it changes one."""
    ours = parse(["--lr", "0.001", "--train-iters", "20"])
    ours = replace(ours, optimizer=replace(ours.optimizer, lr_decay_iters=20))
    state = replace(STATE, iteration=10, consumed_samples=80, config=json.loads(json.dumps(asdict(ours))))
    table: tuple[tuple[dict[str, dict[str, Any]], str], ...] = (
        ({"training": {"seed": 5}}, "--seed is 5, and was 1234 when this was saved: the samples have another order: "
         "training continues at sample 80 of it,"),
        ({"training": {"global_batch_size": 16}}, "--global-batch-size is 16, and was 0 when this was saved: training "
         "continues at sample 80 with batches of another size,"),
        ({"optimizer": {"lr": 0.5, "lr_decay_style": "cosine"}}, "--lr is 0.5, and was 0.001; --lr-decay-style is "
         "cosine, and was constant when this was saved: from iteration 11 on, the new schedule gives another"),
        ({"optimizer": {"optimizer": "lion"}}, "--optimizer is lion, and was adamw when this was saved: the "
         "optimizer's states begin at 0,"),
        ({"optimizer": {"weight_decay": 0.5}}, "--weight-decay is 0.5, and was 0.01 when this was saved: updates"),
        ({"training": {"precision": "bf16"}}, "--precision is bf16, and was fp32 when this was saved: values are"),
        ({"data": {"eod_mask_loss": True}}, "--eod-mask-loss is on, and was off when this was saved: training minim"),
        ({"data": {"packing": "best-fit", "reset_attention_mask": True, "reset_position_ids": True}}, "--packing is "
         "best-fit, and was split when this was saved: samples hold other documents, and with best-fit alone attention "
         "stays within these: training continues at sample 80 of the new samples,"),
        ({"model": {"window_size": 8}}, "--window-size is 8, and was 0 when this was saved: the model computes"),
        ({"model": {"activation": "relu"}}, "--activation is relu, and was gelu-tanh when this was saved: the model"),
        ({"parallel": {"tensor_model_parallel_size": 2}}, ""),
        ({"zero": {"zero_stage": 3}}, ""),
        ({"training": {"train_iters": 30}}, ""),
        ({"optimizer": {"lr_warmup_iters": 10, "min_lr": 0.5, "optimizer_cpu_offload": True}}, ""),
        ({"data": {"tokenizer": "byte", "num_workers": 3}}, ""),
        ({"monitor": {"hang_timeout": 3.0}}, ""),
    )  # fmt: skip
    for changes, begins in table:
        groups = {group: replace(getattr(ours, group), **options) for group, options in changes.items()}
        found = changed_options(state, replace(ours, **groups))
        assert len(found.warnings) == bool(begins) and bool(found.notes) == (not begins), (changes, found)
        for warning in found.warnings:
            assert warning.startswith(begins) and warning.endswith("the loss curve differs from here"), warning
    older = replace(state, config={"training": state.config["training"]})  # before --optimizer
    assert changed_options(older, replace(ours, optimizer=replace(ours.optimizer, optimizer="lion"))).warnings
    del state.config["data"]["packing"], state.config["model"]["activation"]  # before these flags
    relu = replace(ours, model=replace(ours.model, activation="relu"))
    assert "--activation is relu, and was gelu-tanh" in changed_options(state, relu).warnings[0]
    packed = replace(ours, data=replace(ours.data, packing="best-fit"))
    assert "--packing is best-fit, and was split" in changed_options(state, packed).warnings[0]


def test_flags_that_were_not_given_again_are_named_as_they_were() -> None:
    changed = {"lr": 0.002, "clip_grad": 0.5, "lr_decay_iters": 7}  # which was the default, --train-iters
    ours = parse(["--lr", "0.001"])
    frozen = replace(ours.training, freeze_parameters=("blocks.[01].*", "head.*"), train_iters=7)
    older = replace(ours, optimizer=replace(ours.optimizer, **changed), training=frozen)
    state = replace(STATE, config=json.loads(json.dumps(asdict(older))))
    assert not any("as before" in text for texts in changed_options(state, ours) for text in texts)  # all were given
    found = changed_options(state, ours, {"lr"})
    assert found.notes[-1] == "not given now; to continue as before, add: --train-iters 7"
    updates, rate = found.warnings
    assert updates.endswith(
        "here. To continue as before, add: --freeze-parameters 'blocks.[01].*' 'head.*' --clip-grad 0.5"
    )
    assert rate.endswith("the loss curve differs from here")
    assert changed_options(state, ours, set()).warnings[1].endswith(". To continue as before, add: --lr 0.002")
    assert changed_options(replace(STATE, config=json.loads(json.dumps(asdict(ours)))), ours, set()) == ([], [])
    state.config["data"]["tokenizer"] = "byte"
    assert "--tokenizer is empty, and was byte when this was saved" in changed_options(state, ours).notes


# -- folders


def test_folders_that_cannot_be_written_are_refused_at_the_start(tmp_path: Path) -> None:
    for flag, field in (("save", CheckpointConfig), ("log-dir", LogConfig), ("tensorboard-dir", LogConfig)):
        group = "checkpoint" if field is CheckpointConfig else "log"
        name = flag.replace("-", "_")
        for path, words in (
            ("/proc/nothing/here", "cannot write there"),
            (str(tmp_path / ("x" * 256)), "a name in it has 256 bytes"),
            (str(tmp_path / "\udcff"), "is not UTF-8"),
        ):
            with pytest.raises(ValueError, match=f"--{flag} .*{words}"):
                check_values(replace(Config(), **{group: field(**{name: path})}))
    assert os.listdir(tmp_path) == []


def test_a_prediction_writes_to_log_dir_alone() -> None:
    """Its other folders may be those of another machine."""
    there = "/proc/nothing/here"
    for asked in ("--plan --device-type cpu", "--plan-search --device-type cpu --world-size 2", "--rehearse 2", ""):
        for flags in (f"--save {there}", f"--save {there} --save-hf {there}/hf", f"--tensorboard-dir {there}"):
            with nullcontext() if asked else pytest.raises(ValueError, match=f"--.* {there}.*: cannot write there"):
                check_values(parse(f"{asked} {flags}".split()))
        with pytest.raises(ValueError, match=f"--log-dir {there}: cannot write there"):
            check_values(parse(f"{asked} --log-dir {there}".split()))


# -- the state


@for_each(
    ("change", "words"),
    [
        ({"iteration": -1}, r"`int` >= 0 - at `\$.iteration`"),
        ({"iteration": None}, r"`int`, got `null` - at `\$.iteration`"),
        ({"model": []}, r"`object`, got `array` - at `\$.model`"),
        ({"config": {"data": 3}}, r"`str \| object`, got `int` - at `\$.config\[...\]`"),
        ({"loss_scale": {"value": 0.0, "left": 1, "good": 1}}, r"`float` > 0.0 - at `\$.loss_scale.value`"),
        ({"loss_scale": {"value": 1e999, "left": 1, "good": 1}}, r"`float` <= 1.79.* - at `\$.loss_scale.value`"),
        ({"fingerprints": ["x"]}, r"at `\$.fingerprints\[0\]`"),
        ({"saved_tokenizer": "/etc/tokenizer"}, r"at `\$.saved_tokenizer`"),
        ({"run": 5}, r"`str`, got `int` - at `\$.run`"),
    ],
)
def test_a_state_of_another_form_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RunState.parse(STATE.to_json() | change)


def test_a_batch_with_a_sample_that_is_left_out_is_left_out() -> None:
    """The run continues after the last sample that is left out, wherever these and a batch of 4 begin."""
    batches = parse("--global-batch-size 4".split())
    for start, stop, next_one in itertools.product(range(8), range(1, 10), range(8)):
        if start >= stop:
            continue
        progress = Progress(consumed_samples=next_one)
        trainer = SimpleNamespace(config=batches, left_out=range(start, stop), progress=progress)
        Trainer.skip_samples(cast(Trainer, trainer))
        skips = bool({*trainer.left_out} & {*range(next_one, next_one + 4)})
        assert progress.consumed_samples == (stop if skips else next_one), (start, stop, next_one)


def test_a_state_of_an_earlier_version_is_read() -> None:
    """Without later additions."""
    content = {
        k: v for k, v in STATE.to_json().items() if k not in ("run", "sound", "skipped_in_a_row", "fingerprints")
    }
    assert RunState.parse(content) == replace(STATE, run="")
