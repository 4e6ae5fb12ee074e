"""Flushes and renames of a save and a corpus, in order: seen at calls to the system; no test can cut the power."""

import errno
import os
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megazero import checkpoint
from megazero.checkpoint.shards import LocalShard
from megazero.data.writer import IndexedWriter
from megazero.files import new_folder
from tests.helpers.table import for_each

Event = tuple[str, ...]  # ("flush", path), ("make", path), ("write", path) or ("rename", from, to)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Event]]:
    """Record the flushes, renames and new files and folders of the test, and the writes to files."""
    found: list[Event] = []

    def path_of(handle: int) -> str:
        return os.readlink(f"/proc/self/fd/{handle}")

    def making(path: Any, *how: Any, **more: Any) -> None:
        mkdir(path, *how, **more)
        found.append(("make", os.path.abspath(path)))

    def opening(path: Any, flags: int, *how: Any, **more: Any) -> int:
        new = bool(flags & os.O_CREAT) and not os.path.exists(path)
        handle = opened(path, flags, *how, **more)
        if new:
            found.append(("make", os.path.abspath(path)))
        return handle

    def writing(handle: int, *data: Any) -> int:
        found.append(("write", path_of(handle)))
        return pwrite(handle, *data)

    mkdir, opened, pwrite = os.mkdir, os.open, os.pwrite

    def flushing(original: Any) -> Any:
        def call(handle: Any) -> None:
            number = handle if isinstance(handle, int) else handle.fileno()
            original(handle)
            found.append(("flush", path_of(number)))

        return call

    def renaming(original: Any) -> Any:
        def call(source: Any, target: Any, **how: Any) -> None:
            original(source, target, **how)
            found.append(("rename", os.path.abspath(source), os.path.abspath(target)))

        return call

    monkeypatch.setattr(os, "mkdir", making)
    monkeypatch.setattr(os, "open", opening)
    monkeypatch.setattr(os, "pwrite", writing)
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, flushing(getattr(os, name)))
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, renaming(getattr(os, name)))
    yield found


def save(root: Path, iteration: int, value: float, attached: tuple[str, ...] = ()) -> Path:
    shape = (5, 7)
    shards = {"w": LocalShard(shape, (0, 0), shape, 0, prod(shape), torch.full((prod(shape),), value))}
    return checkpoint.save(root, iteration, shards, {"v": value}, attached=dict.fromkeys(attached, b"content"))


def assert_flushed(events: list[Event], until: int) -> None:
    """A file is flushed after its last write, and the folder that names a file or folder after it was made."""
    before = events[:until]
    renamed = {source for kind, source, *_ in events if kind == "rename"}
    for place, (kind, path, *_) in enumerate(before):
        if kind == "write":
            assert ("flush", path) in before[place:], f"{path} is not flushed"
        elif kind == "make" and path not in renamed:
            assert ("flush", os.path.dirname(path)) in before[place:], f"the name of {path} is not flushed"


@for_each("at", [1, 2])
def test_a_flush_that_fails_fails_the_save(at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flushes during writing, and the last one; the system reports an error once."""
    monkeypatch.setattr("megazero.checkpoint.tensor_file.FLUSH_BYTES", 16)
    original, calls = os.fsync, []

    def failing(handle: int) -> None:
        calls.append(os.readlink(f"/proc/self/fd/{handle}"))
        if len(calls) == at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        original(handle)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(
        RuntimeError, match=r"rank_00000.safetensors'?: ?.*Input/output error|Input/output error.*rank_00000"
    ):
        save(tmp_path, 1, 0.0)
    assert calls == [str(tmp_path / ".iter_0000001.partial" / "rank_00000.safetensors")] * at
    assert not checkpoint.checkpoints(tmp_path)


@pytest.mark.parametrize("again", [False, True])
def test_what_is_named_is_on_the_disk(again: bool, tmp_path: Path, events: list[Event]) -> None:
    """Files, then the folder that lists them, are flushed before the folder gets its name; that is flushed before
    `latest` names it; and `latest` too is flushed before and after it gets its name."""
    root = tmp_path.resolve()
    save(root, 3, 0.0)
    if again:
        save(root, 4, 1.0)
    events.clear()
    path = save(root, 4, 2.0)

    def at(*event: str) -> int:
        """The last such event."""
        assert event in events, (event, events)
        return len(events) - 1 - events[::-1].index(event)

    (partial,) = (source for kind, source, *target in events if kind == "rename" and target == [str(path)])
    named = at("rename", partial, str(path))
    files = [at("flush", f"{partial}/{name}") for name in os.listdir(path)]
    assert len(files) == 3
    assert max(files) < at("flush", partial) < named
    (written,) = (source for kind, source, *target in events if kind == "rename" and target == [f"{root}/latest"])
    pointed = at("rename", written, f"{root}/latest")
    flushes = [i for i, event in enumerate(events) if event == ("flush", str(root))]
    assert any(named < i < pointed for i in flushes)
    assert named < pointed and at("flush", written) < pointed < max(flushes)
    assert (root / "latest").read_text().strip() == path.name


def test_everything_that_a_save_makes_is_on_the_disk(tmp_path: Path, events: list[Event]) -> None:
    """Also attached files, the folder of these, and folders above --save."""
    root = tmp_path.resolve() / "new" / "s"
    path = save(root, 4, 2.0, attached=("tokenizer/tokenizer.json", "tokenizer/more.json"))
    (named,) = (at for at, event in enumerate(events) if event[0] == "rename" and event[2] == str(path))
    made = {os.path.relpath(event[1], root) for event in events[:named] if event[0] == "make"}
    partial = ".iter_0000004.partial"
    files = "rank_00000.safetensors", "state.json", "manifest.json", "tokenizer/tokenizer.json", "tokenizer/more.json"
    assert made == {"..", ".", partial, f"{partial}/tokenizer", *(f"{partial}/{name}" for name in files)}
    assert_flushed(events, named)


def test_everything_in_a_new_folder_is_on_the_disk(tmp_path: Path, events: list[Event]) -> None:
    target = tmp_path.resolve() / "above" / "made"
    with new_folder(target) as folder:
        (folder / "deep" / "deeper").mkdir(parents=True)
        for name in ("a", "deep/b", "deep/deeper/c"):
            (folder / name).write_text("content")
            events += [("make", str(folder / name)), ("write", str(folder / name))]
    (named,) = (at for at, event in enumerate(events) if event[0] == "rename" and event[2] == str(target))
    assert_flushed(events, named)
    assert ("flush", str(target.parent)) in events[named:]


def test_the_files_and_names_of_a_corpus_are_on_the_disk(tmp_path: Path, events: list[Event]) -> None:
    """Files before they get their names; the index last, after which the folder is flushed."""
    prefix = f"{tmp_path.resolve()}/c"
    with IndexedWriter(prefix, "uint16", {"tokenizer": "byte"}, masked=True) as writer:
        writer.add_documents(np.arange(5), np.array([2, 3]), mask=np.ones(5, dtype=bool))
    renames = [(at, event) for at, event in enumerate(events) if event[0] == "rename"]
    assert [name for _, (_, _, name) in renames[-4:]] == [f"{prefix}.{end}" for end in ("bin", "mask", "json", "idx")]
    assert_flushed(events, len(events))
    assert ("flush", str(tmp_path.resolve())) in events[renames[-1][0] :]
    for at, (_, source, name) in renames[-4:]:
        assert ("flush", source) in events[:at] or name.endswith(".json")  # flushed under an earlier name


def test_latest_is_replaced_and_never_written_to(tmp_path: Path) -> None:
    """Readers of an open file or of a hard link still see the old contents."""
    save(tmp_path, 1, 0.0)
    os.link(tmp_path / "latest", tmp_path / "seen")
    save(tmp_path, 2, 0.0)
    assert (tmp_path / "seen").read_text().strip() == "iter_0000001"
    assert (tmp_path / "latest").read_text().strip() == "iter_0000002"
