"""Preprocessing that is killed and started again: the result is that of an uninterrupted run, byte for byte."""

import contextlib
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from data_tools import preprocess_data, reading
from data_tools.journal import WorkFolder

CALLS = ("pwrite", "ftruncate", "fsync", "replace", "rename", "unlink", "rmdir", "mkdir")


class Killed(BaseException):
    """The process is gone."""


class Machine:
    """Ends the process, as far as the disk is concerned, at the n-th call that changes a file.

    From then on every such call fails, so that no clean-up reaches the disk. A write that is the n-th does
    half of its work. `full`: the disk takes no more bytes from that call on, while everything else works.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, full: bool = False) -> None:
        self.calls, self.limit, self.full = 0, 1 << 60, full
        for name in CALLS:
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name: str, call: Callable) -> Callable:
        def wrapped(*arguments, **named):
            if self.full and name != "pwrite":
                return call(*arguments, **named)
            self.calls += 1
            if self.calls < self.limit:
                return call(*arguments, **named)
            if name == "pwrite" and self.calls == self.limit:
                handle, data, at = arguments
                call(handle, data[: len(data) // 2], at)
            if self.full:
                raise OSError(28, "No space left on device")
            raise Killed

        return wrapped

    def start(self, limit: int) -> None:
        self.calls, self.limit = 0, limit


@pytest.fixture
def command(tmp_path: Path, monkeypatch) -> Callable[[str], list[str]]:
    """A command with everything on. Its chunks are small, each is committed; a fifth of the documents are copies."""
    monkeypatch.setattr(reading, "CHUNK_BYTES", 600)
    monkeypatch.setattr(preprocess_data, "COMMIT_BYTES", 1000)
    draw, lines = random.Random(0), []
    for k in range(120):
        document = {"q": "é" * draw.randrange(60), "a": f"{draw.randrange(90)} answer"}
        line = lines[k - 40] if k > 40 and k % 3 == 0 else json.dumps(document, ensure_ascii=False)
        lines.append("bad" if k % 17 == 3 else line)  # a repeated line is some commits after the original
    for name, part in (("a.jsonl", lines[:70]), ("b.jsonl", lines[70:])):
        (tmp_path / name).write_text("\n".join(part) + "\n")

    def of(name: str) -> list[str]:
        inputs = ["--input", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
        more = "--tokenizer byte --json-keys q a --append-eod --workers 1 --on-bad-line skip --dedup"
        return [*inputs, "--output-prefix", str(tmp_path / name / "p"), *more.split()]

    return of


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(params=["q a", pytest.param("q:0 a:1", id="masked")])
def masked_too(request: pytest.FixtureRequest, command: Callable[[str], list[str]]) -> Callable[[str], list[str]]:
    """The command for two corpora, and for one with a loss mask."""
    return lambda name: [*command(name), "--json-keys", *request.param.split()]


def expected(tmp_path: Path, command: Callable[[str], list[str]]) -> dict[str, bytes]:
    preprocess_data.main(command("whole"))
    whole = content(tmp_path / "whole")
    keys, ends = ("q_a",), ("bin", "idx", "json", "mask")
    if "q:0" not in command("whole"):
        keys, ends = ("a", "q"), ends[:3]
    names = [f"p_{key}_document.{end}" for key in keys for end in ends]
    assert sorted(whole) == sorted([*names, "p_skipped.txt"])
    assert json.loads(whole[f"p_{keys[-1]}_document.json"])["duplicate_documents"] > 20
    return whole


def no_half_corpus(folder: Path) -> None:
    """Files that bear a corpus's name are a corpus: its index appears last."""
    for idx in folder.glob("*.idx"):
        assert idx.with_suffix(".bin").exists() and idx.with_suffix(".json").exists()


@pytest.mark.long
@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_every_call_that_changes_a_file(tmp_path: Path, masked_too, monkeypatch, capsys, step: int) -> None:
    command = masked_too
    whole = expected(tmp_path, command)
    machine = Machine(monkeypatch)
    preprocess_data.main(command("count"))
    total = machine.calls
    assert total > 150
    for limit in range(1, total + 1, step):
        folder = tmp_path / "x"
        machine.start(limit)
        with contextlib.suppress(Killed):
            preprocess_data.main(command("x"))
        machine.start(1 << 60)
        no_half_corpus(folder) if folder.exists() else None
        preprocess_data.main(command("x"))
        assert content(folder) == whole, limit
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


@pytest.mark.long
def test_killed_again_and_again(tmp_path: Path, masked_too, monkeypatch, capsys) -> None:
    command = masked_too
    whole = expected(tmp_path, command)
    machine, draw, kills = Machine(monkeypatch), random.Random(1), 0
    for turn in range(8):
        done = False
        while not done:
            machine.start(draw.randrange(1, 90))
            try:
                preprocess_data.main(command(f"x{turn}"))
                done = True
            except Killed:
                kills += 1
        assert content(tmp_path / f"x{turn}") == whole
    assert kills > 50
    assert "resuming after" in capsys.readouterr().err


def test_what_a_commit_counts_on_is_on_the_disk(tmp_path: Path, command, monkeypatch) -> None:
    """A power cut loses writes that were not flushed: when the journal gets its name, no file may have any.

    It loses names too: when the journal is deleted, those of all results are on the disk.
    """
    pending, commits, unnamed, named = set[str](), list[set[str]](), set[str](), list[set[str]]()
    pwrite, fsync, replace, unlink = os.pwrite, os.fsync, os.replace, os.unlink

    def written(handle: int, *rest: Any) -> int:
        pending.add(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        return pwrite(handle, *rest)

    def flushed(handle: int) -> None:
        fsync(handle)
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        pending.discard(path.name)
        if path.is_dir():
            unnamed.difference_update({name for name in unnamed if Path(name).parent == path})

    def deleted(path: Any) -> None:
        if Path(path).name == "journal.json":
            named.append(set(unnamed))
        unlink(path)

    def renamed(source: Any, target: Any) -> None:
        if Path(target).name == "journal.json":
            commits.append(set(pending))
        replace(source, target)
        unnamed.add(os.path.abspath(target))

    patched = {"pwrite": written, "fsync": flushed, "replace": renamed, "rename": renamed, "unlink": deleted}
    for name, call in patched.items():
        monkeypatch.setattr(os, name, call)
    preprocess_data.main([*command("x"), "--json-keys", "q:0", "a:1"])
    assert len(commits) > 5 and commits == [set()] * len(commits)
    assert named == [set()] and (tmp_path / "x" / "p_skipped.txt").exists()


@pytest.mark.long
def test_a_full_disk_loses_nothing(tmp_path: Path, command, monkeypatch, capsys) -> None:
    whole = expected(tmp_path, command)
    machine = Machine(monkeypatch, full=True)
    preprocess_data.main(command("count"))
    for limit in range(1, machine.calls + 1, 3):
        folder = tmp_path / f"x{limit}"
        machine.start(limit)
        with pytest.raises(OSError, match="No space left") as caught:
            preprocess_data.main(command(folder.name))
        no_half_corpus(folder)
        if (folder / "p.partial").exists():
            assert "the same command resumes from there" in caught.value.__notes__[0]
            kept = sum(path.stat().st_size for path in (folder / "p.partial").iterdir() if path.is_file())
            assert kept < 60_000  # uncommitted bytes are freed
        else:
            assert list(folder.iterdir()) == []
        machine.start(1 << 60)
        preprocess_data.main(command(folder.name))
        assert content(folder) == whole, limit


@pytest.fixture
def unfinished(tmp_path: Path, command, monkeypatch) -> Iterator[Path]:
    """The prefix of a run that was killed half-way."""
    with pytest.MonkeyPatch.context() as patch:
        machine = Machine(patch)
        preprocess_data.main(command("count"))
        machine.start(machine.calls // 2)
        with contextlib.suppress(Killed):
            preprocess_data.main(command("x"))
    assert (tmp_path / "x" / "p.partial" / "journal.json").exists()
    yield tmp_path / "x" / "p"


def test_another_commands_work_is_refused_not_overwritten(tmp_path: Path, command, unfinished: Path) -> None:
    kept = content_of_work(unfinished)
    for more, flag in (
        (["--no-append-eod"], "--append-eod"),
        (["--no-dedup"], "--dedup"),
        (["--dtype", "int32"], "--dtype"),
        (["--json-keys", "a", "q"], "--json-keys"),
        (["--json-keys", "q:0", "a:1"], "--json-keys"),
        (["--input", str(tmp_path / "a.jsonl")], r"--input \(names, sizes or dates of files\)"),
    ):
        with pytest.raises(ValueError, match=f"holds the unfinished work of another run, with other {flag}; give the"):
            preprocess_data.main([*command("x"), *more])
        assert content_of_work(unfinished) == kept
    os.utime(tmp_path / "b.jsonl", (1, 1))
    with pytest.raises(ValueError, match="other --input"):
        preprocess_data.main(command("x"))


def content_of_work(prefix: Path) -> dict[str, bytes]:
    return content(Path(f"{prefix}.partial"))


def test_what_does_not_change_the_result_may_change(tmp_path: Path, command, unfinished: Path) -> None:
    preprocess_data.main([*command("x"), "--workers", "2", "--no-gigatoken"])
    preprocess_data.main(command("whole"))
    assert content(tmp_path / "x") == content(tmp_path / "whole")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"job": 1}', "[" * 100_000])
def test_a_damaged_journal_is_not_believed(command, unfinished: Path, text: str) -> None:
    Path(f"{unfinished}.partial/journal.json").write_text(text)
    with pytest.raises(
        ValueError, match=r"journal.json is damaged; .*or delete .*p.partial to start again|other --input"
    ):
        preprocess_data.main(command("x"))


def test_files_that_lost_their_end_are_not_believed(command, unfinished: Path) -> None:
    os.truncate(f"{unfinished}.partial/0.bin", 1)
    with pytest.raises(ValueError, match=r"0.bin is 1 bytes long, and \d+ bytes of it are needed to resume"):
        preprocess_data.main(command("x"))


def test_two_runs_do_not_work_on_one_prefix(tmp_path: Path, command, unfinished: Path) -> None:
    job = json.loads(Path(f"{unfinished}.partial/journal.json").read_text())["job"]
    first = WorkFolder(str(unfinished), job)
    with pytest.raises(ValueError, match=r"another run works on it, in .*p\.partial; wait for it"):
        preprocess_data.main(command("x"))
    first.close()
    preprocess_data.main(command("x"))


def test_an_error_before_the_first_commit_leaves_nothing(tmp_path: Path, command) -> None:
    (tmp_path / "a.jsonl").write_text("bad\n")
    with pytest.raises(ValueError, match=r"a.jsonl:1: malformed JSON.*; mend it, or give --on-bad-line skip"):
        preprocess_data.main([*command("x"), "--on-bad-line", "stop"])
    assert list((tmp_path / "x").iterdir()) == []


def test_a_bad_line_late_keeps_the_work_and_skip_goes_on(tmp_path: Path, command, capsys) -> None:
    path = tmp_path / "b.jsonl"
    path.write_text(path.read_text().replace("bad\n", "") + "bad\n")
    (tmp_path / "a.jsonl").write_text((tmp_path / "a.jsonl").read_text().replace("bad\n", ""))
    with pytest.raises(ValueError, match="malformed JSON") as caught:
        preprocess_data.main([*command("x"), "--on-bad-line", "stop"])
    assert "the same command resumes from there" in caught.value.__notes__[0]
    preprocess_data.main(command("x"))
    preprocess_data.main(command("whole"))
    assert content(tmp_path / "x") == content(tmp_path / "whole")
    assert "resuming after" in capsys.readouterr().err


def test_a_users_folder_by_the_name_of_the_work_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "p.partial").mkdir()
    (tmp_path / "p.partial" / "notes.txt").write_text("notes")
    with pytest.raises(ValueError, match=r"--output-prefix .*p: .*p.partial has files, and is not the work of an unf"):
        WorkFolder(str(tmp_path / "p"), {})
    assert content(tmp_path / "p.partial") == {"notes.txt": b"notes"}
