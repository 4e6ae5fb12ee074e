"""Saves of a run that trains on, and the state besides weights that a resume restores."""

import contextlib
import errno
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megazero import checkpoint
from megazero.checkpoint import shared_outcome, tensor_file
from megazero.flags.config import Config, EvaluationConfig
from megazero.run.run_state import Progress
from megazero.run.stopping import ENDING, EVALUATING, Clock, DeadRun, Signals, Wish, training_promise
from megazero.run.training_run import TrainingRun
from tests.parallel.runs import configured, names, quietly, run_of, weights, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "small")


# -- a save that fails, and folders that cannot be deleted


def test_the_watchdog_does_not_watch_a_save_and_watches_again_after_one_that_fails(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, seen = run_of(0, 1, configured(corpus, tmp_path, 3)), []

    def full(tensor: torch.Tensor) -> memoryview:
        seen.append(run.watchdog.doing)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tensor_file, "host_bytes", full)
    run.watchdog.doing = "what follows iteration 1"
    run.checkpoints.save(Progress(1, 4))
    assert seen == [""] and run.watchdog.doing == "what follows iteration 1"


def test_an_error_of_one_rank_alone_ends_the_run(corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes between two messages of a save, of which the other ranks may know nothing."""

    def struck(*_: Any) -> None:
        raise RuntimeError("struck")

    monkeypatch.setattr(shared_outcome, "gather_bytes", struck)
    with pytest.raises(RuntimeError, match="struck"):
        run_of(0, 1, configured(corpus, tmp_path, 3)).checkpoints.save(Progress(1, 4))


def test_what_cannot_be_deleted_does_not_end_the_run(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Use --keep-last 1 with a link in place of iteration 1. After that, the folder cannot be read."""
    root = tmp_path / "saved"
    run = run_of(0, 1, configured(corpus, root, 3, save_interval=1, keep_last=1))
    step = run.trainer.engine.train_step

    def moved(iteration: int, batches: Any, samples: int) -> Any:
        if iteration == 2:
            (root / "iter_0000001").rename(tmp_path / "elsewhere")
            (root / "iter_0000001").symlink_to(tmp_path / "elsewhere")
        return step(iteration, batches, samples)

    run.trainer.engine.train_step = moved
    run.train()
    assert run.trainer.progress.iteration == 3 and names(root) == [1, 3]
    assert weights(tmp_path / "elsewhere").any()

    def stale(*_: Any) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(root))

    monkeypatch.setattr(checkpoint, "prune", stale)
    run.checkpoints.save(Progress(4, 16))
    assert names(root) == [1, 3, 4]
    assert f"cannot delete old checkpoints in --save {root}: " in capfd.readouterr().err


def test_a_checkpoint_that_another_run_prunes_is_passed_over_at_the_load(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Load the newer checkpoint, because the tensors of the first are gone."""
    quietly(run_of(0, 1, configured(corpus, tmp_path, 2, save_interval=1)))
    (tmp_path / "latest").write_text("iter_0000001")
    run, load = run_of(0, 1, configured(corpus, "", 2, load=str(tmp_path))), checkpoint.load

    def late(path: Path, *arguments: Any, **options: Any) -> None:
        if path.name == "iter_0000001":  # as a run does that keeps the last one
            shutil.rmtree(path)
            (tmp_path / "latest").write_text("iter_0000002")
        load(path, *arguments, **options)

    monkeypatch.setattr(checkpoint, "load", late)
    with contextlib.redirect_stdout(open(os.devnull, "w")):
        loaded, progress = run.loader.resume()
    assert loaded == tmp_path / "iter_0000002" and progress.iteration == 2


# -- in the background


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[TrainingRun], None]]:
    """held(run) holds the writer of each save in the background until the run waits for that save."""
    gate, write = threading.Event(), tensor_file.host_bytes

    def hold(run: TrainingRun) -> None:
        assert run.checkpoints.saver is not None
        finish = run.checkpoints.saver.finish

        def finish_at_last() -> Path | None:
            gate.set()
            try:
                return finish()
            finally:
                gate.clear()

        def held_bytes(tensor: torch.Tensor) -> memoryview:
            assert gate.wait(60)
            return write(tensor)

        monkeypatch.setattr(run.checkpoints.saver, "finish", finish_at_last)
        monkeypatch.setattr(tensor_file, "host_bytes", held_bytes)

    yield hold
    gate.set()


def test_a_save_in_the_background_keeps_the_values_of_its_iteration(
    corpus: str, tmp_path: Path, held: Callable[[TrainingRun], None]
) -> None:
    """Write each checkpoint when the next iteration has changed all values."""
    for name, background in (("now", False), ("later", True)):
        run = run_of(0, 1, configured(corpus, tmp_path / name, 3, save_interval=1, async_save=background))
        run.checkpoints.attached = {"tokenizer/tokenizer.json": b"{}"}
        if background:
            held(run)
        quietly(run)
    for iteration in (1, 2, 3):
        now, later = (tmp_path / name / f"iter_000000{iteration}" for name in ("now", "later"))
        for file in ("rank_00000.safetensors", "tokenizer/tokenizer.json"):
            assert (now / file).read_bytes() == (later / file).read_bytes()
        states = [checkpoint.read_state(path) for path in (now, later)]
        for key in ("iteration", "consumed_samples", "updates", "sound"):
            assert states[0][key] == states[1][key], key


def skipping(run: TrainingRun, first: int) -> None:
    """Make no update from iteration `first` on."""
    step = run.trainer.engine.train_step

    def skipped(iteration: int, batches: Any, samples: int) -> Any:
        result = step(iteration, batches, samples)
        return result._replace(skipped=True, skip_reason="planted") if iteration >= first else result

    run.trainer.engine.train_step = skipped


def test_a_run_that_dies_waits_for_its_save_in_the_background(
    corpus: str, tmp_path: Path, held: Callable[[TrainingRun], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Each iteration without an update names its samples, by which --skip-samples leaves them out."""
    options = {"save_interval": 1, "async_save": True, "max_skipped_iterations": 2}
    run = run_of(0, 1, configured(corpus, tmp_path, 9, **options))
    held(run)
    skipping(run, 2)
    with pytest.raises(DeadRun, match="iteration 3: 2 iterations in a row made no update"):
        quietly(run)
    assert names(tmp_path) == [1, 2]
    batch = run.trainer.config.training.global_batch_size
    for at in (2, 3):
        words = f"iteration {at}, of samples {(at - 1) * batch} to {at * batch - 1}, makes no update: planted"
        assert words in caplog.text


def saving_minutes(rank: int, config: Config) -> float:
    saver = run_of(rank, 2, config).checkpoints.saver
    assert saver is not None and saver._group is not None
    return saver._group._get_backend(torch.device("cpu")).options._timeout.total_seconds() / 60


@pytest.mark.parametrize(("minutes", "waits"), [(0.5, 60), (90.0, 90)])
def test_ranks_wait_long_for_a_save_in_the_background(
    ranks: Any, corpus: str, tmp_path: Path, minutes: float, waits: float
) -> None:
    """Wait for --distributed-timeout-minutes, and for at least an hour, because a slow disk is no lost rank."""
    config = configured(corpus, tmp_path, 1, async_save=True)
    config = replace(config, parallel=replace(config.parallel, distributed_timeout_minutes=minutes))
    assert ranks(2).run(saving_minutes, config) == [waits] * 2


# -- by time, by signal


def test_a_save_by_time_begins_the_time_anew(corpus: str, tmp_path: Path) -> None:
    """Let the minute of --save-interval-minutes 1 pass in iteration 2, and not again before the end."""
    run = run_of(0, 1, configured(corpus, tmp_path, 5))
    step = run.trainer.engine.train_step

    def long(iteration: int, batches: Any, samples: int) -> Any:
        if iteration == 2:
            run.wishes.clock = Clock(0.0, 0.0, lambda: None, save_minutes=1.0)
            run.wishes.clock.saved(time.time() - 61)
        return step(iteration, batches, samples)

    run.trainer.engine.train_step = long
    quietly(run)
    assert names(tmp_path) == [2, 5]


def test_a_run_promises_how_it_reacts_to_an_interrupt(corpus: str, tmp_path: Path) -> None:
    """In each step with and without --save, and in the last save."""
    seen = list[str]()
    for save in (str(tmp_path), ""):
        run = run_of(0, 1, configured(corpus, save, 1))
        step, unwatched = run.trainer.engine.train_step, run.checkpoints._unwatched

        def noting(function: Any, signals: Signals) -> Any:
            def noted(*arguments: Any) -> Any:
                seen.append(signals.promise)
                return function(*arguments)

            return noted

        run.trainer.engine.train_step = noting(step, run.wishes.signals)
        run.checkpoints._unwatched = noting(unwatched, run.wishes.signals)
        quietly(run)
    assert seen == [training_promise(str(tmp_path)), ENDING, training_promise("")]


def test_an_evaluation_alone_ends_when_it_is_asked_to(corpus: str, tmp_path: Path) -> None:
    """Send the signal in the first global batch of --eval-only. The threads that read ahead end too."""
    quietly(run_of(0, 1, configured(corpus, tmp_path, 1)))
    config = configured(corpus, "", 1, load=str(tmp_path))
    only = EvaluationConfig(eval_only=True, eval_iters=3, eval_split="train")
    with Signals() as signals:
        run = run_of(0, 1, replace(config, evaluation=only))
        run.wishes.signals = signals
        evaluate, calls = run.trainer.engine.evaluate_by_corpus, []

        def interrupted(batches: Any) -> Any:
            calls.append(batches)
            assert signals.promise == EVALUATING
            os.kill(os.getpid(), signal.SIGUSR1)
            return evaluate(batches)

        run.trainer.engine.evaluate_by_corpus = interrupted
        with contextlib.redirect_stdout(open(os.devnull, "w")):
            assert run.evaluate() == Wish.STOP_SIGUSR1
    ((_, batches, _),) = run.trainer.evaluator.parts
    assert len(calls) == 1 and batches._pool is None


# -- over a resume


def test_checkpoints_of_before_a_resume_are_the_runs_own(corpus: str, tmp_path: Path) -> None:
    """Count them for --keep-last, with --keep-every 3. A resume with nothing to do saves nothing."""
    options = {"save_interval": 1, "keep_last": 2, "keep_every": 3, "load": str(tmp_path)}
    for iterations, kept in ((2, [1, 2]), (5, [3, 4, 5])):
        quietly(run_of(0, 1, configured(corpus, tmp_path, iterations, **options)))
        assert names(tmp_path) == kept
    before = (tmp_path / "iter_0000005").stat().st_ino
    quietly(run_of(0, 1, configured(corpus, tmp_path, 5, **options)))
    assert (tmp_path / "iter_0000005").stat().st_ino == before


def test_the_last_checkpoint_before_skipped_steps_is_kept_over_a_resume(corpus: str, tmp_path: Path) -> None:
    """Keep it in addition to --keep-last 1, because weights after skipped steps may be unsound."""
    options = {"save_interval": 1, "keep_last": 1, "load": str(tmp_path)}
    for iterations, kept in ((4, [2, 4]), (6, [2, 6])):
        run = run_of(0, 1, configured(corpus, tmp_path, iterations, **options))
        skipping(run, 3)
        quietly(run)
        assert names(tmp_path) == kept
    assert checkpoint.read_state(tmp_path / "iter_0000006")["skipped_in_a_row"] == 4
    quietly(run_of(0, 1, configured(corpus, tmp_path, 7, **options)))
    assert names(tmp_path) == [7]
