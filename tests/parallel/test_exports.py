"""Exports of a run to --save-hf: in a thread, once per checkpoint, whole or not at all, and after a failure."""

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megazero.checkpoint.manifest import read_manifest
from megazero.flags.config import CheckpointConfig
from megazero.run.exports import Exports, guard_exports
from megazero.run.training_run import TrainingRun
from tests.helpers.ranks import Ranks
from tests.parallel.runs import configured, names, run_of, train, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "small")


class Writer:
    """Writes an export that holds the name of its checkpoint, and counts them."""

    def __init__(self, error: Exception | None = None) -> None:
        self.written: list[str] = []
        self.error, self.free = error, threading.Event()
        self.free.set()

    def __call__(self, path: Path, output: Path) -> None:
        assert self.free.wait(60)
        read_manifest(path)
        if self.error is not None:
            raise self.error
        output.mkdir(parents=True)
        (output / "of").write_text(path.name)
        self.written.append(path.name)


def exporting(corpus: str, folder: Path, iterations: int, writer: Writer, **options: object) -> TrainingRun:
    options = {"save_hf": str(folder / "exports"), "load": str(folder / "saved")} | options
    run = run_of(0, 1, configured(corpus, folder / "saved", iterations, **options))
    run.exports = Exports(run.checkpoints, writer)
    return run


def go(run: TrainingRun) -> None:
    run.train()


def test_each_export_is_of_the_checkpoint_of_its_iteration(corpus: str, tmp_path: Path) -> None:
    """Every second iteration, which is saved for it, and the last one."""
    writer = Writer()
    go(exporting(corpus, tmp_path, 5, writer, save_hf_interval=2, save_interval=3))
    assert writer.written == ["iter_0000002", "iter_0000004", "iter_0000005"]
    assert names(tmp_path / "saved") == [2, 3, 4, 5] and names(tmp_path / "exports") == [2, 4, 5]
    go(exporting(corpus, tmp_path, 5, writer, save_hf_interval=2))  # nothing to do, and nothing to write
    assert len(writer.written) == 3


def test_a_resume_repeats_the_export_that_was_killed(corpus: str, tmp_path: Path) -> None:
    writer = Writer()
    go(exporting(corpus, tmp_path, 4, writer, save_hf_interval=2))
    left = tmp_path / "exports" / ".iter_0000004.partial"
    (tmp_path / "exports" / "iter_0000004").rename(left)
    inner, other = (left.with_name(name) for name in ("..iter_0000004.partial.partial", ".download.partial"))
    inner.mkdir()
    other.mkdir()  # another program's
    go(exporting(corpus, tmp_path, 5, writer, save_hf_interval=2))
    assert writer.written[2:] == ["iter_0000004", "iter_0000005"] and not left.exists()
    assert not inner.exists() and other.exists()
    # a run that goes back replaces the exports of the iterations that it repeats
    (tmp_path / "exports" / "iter_0000004" / "of").write_text("abandoned")
    second = str(tmp_path / "saved" / "iter_0000002")
    exporting(corpus, tmp_path, 4, writer, save_hf_interval=2, load=second).train()
    assert (tmp_path / "exports" / "iter_0000004" / "of").read_text() == "iter_0000004"


def test_a_checkpoint_that_is_being_exported_is_not_deleted(corpus: str, tmp_path: Path) -> None:
    """--keep-last 1, and an export of iteration 2 that lasts until iteration 4 is saved."""
    writer = Writer()
    run = exporting(corpus, tmp_path, 5, writer, save_hf_interval=2, save_interval=1, keep_last=1)
    step, seen = run.trainer.engine.train_step, []

    def stepping(iteration: int, *rest: object) -> object:
        writer.free.clear() if iteration == 2 else None
        if iteration == 4:
            seen.extend(names(tmp_path / "saved"))
            writer.free.set()
        return step(iteration, *rest)

    run.trainer.engine.train_step = stepping
    go(run)
    assert 2 in seen and writer.written == ["iter_0000002", "iter_0000004", "iter_0000005"]
    assert names(tmp_path / "saved") == [5]


def test_a_failed_export_is_a_warning_and_the_last_one_an_error(
    corpus: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    writer = Writer(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    run = exporting(corpus, tmp_path, 4, writer, save_hf_interval=2)
    with pytest.raises(
        RuntimeError, match=r"exporting to .*exports failed on rank 0: No space left on device; free some space"
    ):
        go(run)
    assert run.trainer.progress.iteration == 4 and names(tmp_path / "saved") == [2, 4]
    assert capfd.readouterr().err.count("cannot export to --save-hf") == 1


def test_a_run_that_stops_early_exports_nothing_new(corpus: str, tmp_path: Path) -> None:
    writer = Writer()
    go(exporting(corpus, tmp_path, 5, writer, exit_interval=3))
    assert names(tmp_path / "saved") == [3] and writer.written == []
    go(exporting(corpus, tmp_path, 4, writer, save_hf_interval=2))  # 3 was saved, and no export of it is due
    assert writer.written == ["iter_0000004"]


def test_folders_of_other_runs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "exports" / "iter_0000002").mkdir(parents=True)
    options = CheckpointConfig(save=str(tmp_path / "saved"), save_hf=str(tmp_path / "exports"))
    own, others = tmp_path / "saved" / "iter_0000002", tmp_path / "other" / "iter_0000002"
    guard_exports(options, own)
    for load, finetune in ((None, False), (others, False), (own, True)):
        with pytest.raises(ValueError, match="holds iter_0000002 of an earlier run"):
            guard_exports(replace(options, finetune=finetune), load)


def on_two(rank: int, corpus: str, folder: Path) -> list[str]:
    writer = Writer()
    options = {"save_hf": str(folder / "exports"), "save_hf_interval": 1, "async_save": True}
    run = run_of(rank, 2, configured(corpus, folder / "saved", 3, tp=2, **options))
    run.exports = Exports(run.checkpoints, writer)
    run.train()
    return writer.written


def test_rank_0_alone_writes_also_with_saves_in_the_background(
    corpus: str, tmp_path: Path, ranks: Callable[[int], Ranks]
) -> None:
    found = ranks(2).run(on_two, corpus, tmp_path)
    assert found == [["iter_0000001", "iter_0000002", "iter_0000003"], []]
    assert train(0, 1, configured(corpus, tmp_path / "saved", 3, load=str(tmp_path / "saved"))) == (3, "")
