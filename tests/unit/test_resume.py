"""Loading and saving of a run: guard and lock of --save, pruning, replaced corpora, bad folders."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megazero import checkpoint
from megazero.checkpoint import LocalShard
from megazero.checkpoint.locking import SaveLock
from megazero.config.cli import parse
from megazero.config.schema import CheckpointConfig, Config, DataConfig, LogConfig, ModelConfig
from megazero.config.validate import check_values
from megazero.data.corpora import parse_data_path
from megazero.data.fingerprint import fingerprint
from megazero.data.writer import IndexedWriter
from megazero.run.resume import changed_options, check_data, find_checkpoint
from megazero.run.run_state import RunState
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
        CheckpointConfig(load=str(there)),
        CheckpointConfig(),
    ]
    for options in begins:
        assert find_checkpoint(replace(Config(), checkpoint=options)) is None


def test_a_damaged_state_falls_back_and_an_exact_load_does_not(tmp_path: Path) -> None:
    older, newer = save(tmp_path, 1), save(tmp_path, 2)
    (newer / "state.json").write_bytes(b" " + (newer / "state.json").read_bytes())
    assert find_checkpoint(config(load=tmp_path)) == older
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
    state = replace(STATE, config=asdict(ours), fingerprints=prints(ours))
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
    assert any(text.startswith("--data-path is") for text in changed_options(state.config, other))
    reset = replace(ours, data=replace(ours.data, reset_attention_mask=True, reset_position_ids=True))
    said = changed_options(state.config, reset)
    for flag in ("--reset-attention-mask", "--reset-position-ids"):
        assert f"{flag} is True, and was False when this was saved" in said


def test_flags_that_were_not_given_again_are_named_as_they_were() -> None:
    changed = {"lr": 0.002, "clip_grad": 0.5}
    ours = parse(["--lr", "0.001"])
    older = replace(ours, optimizer=replace(ours.optimizer, **changed))
    saved = json.loads(json.dumps(asdict(older)))
    assert not any("as before" in text for text in changed_options(saved, ours))  # all were given
    said = changed_options(saved, ours, {"lr"})[-1]
    assert said == "not given now; to continue as before, add: --clip-grad 0.5"
    assert changed_options(saved, ours, set())[-1].endswith(": --lr 0.002 --clip-grad 0.5")
    assert changed_options(json.loads(json.dumps(asdict(ours))), ours, set()) == []
    saved["data"]["tokenizer"] = "byte"
    assert "--tokenizer is empty, and was byte when this was saved" in changed_options(saved, ours)


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


def test_a_state_of_an_earlier_version_is_read() -> None:
    """Without later additions."""
    content = {
        k: v for k, v in STATE.to_json().items() if k not in ("run", "sound", "skipped_in_a_row", "fingerprints")
    }
    assert RunState.parse(content) == replace(STATE, run="")
