"""Requests to stop a run: clocks and signals, without a run."""

import ctypes
import logging
import os
import signal
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megazero import checkpoint
from megazero.checkpoint.shards import LocalShard
from megazero.cluster import agent_notes, scheduler
from megazero.flags.config import CheckpointConfig, Config, EvaluationConfig, PlanConfig
from megazero.log import log
from megazero.run.stopping import (
    SIGNALS,
    Clock,
    Signals,
    Wish,
    Wishes,
    again_words,
    interrupted_words,
    stopped_words,
    training_promise,
)
from megazero.world import STARTED, launched


def test_the_order_of_stops() -> None:
    stops = [wish for wish in Wish if wish.stops]
    assert [stop.exit_code for stop in stops] == [75, 75, 75, 75, 75, 0, 0]
    assert [stop.why for stop in stops[::6]] == ["nodes that came back", "the stop file"]
    assert [stop.why for stop in stops[2:5]] == ["SIGTERM", "SIGUSR1", "SIGINT"]
    assert max(Wish.CONTINUE, Wish.SAVE) < stops[0]


def test_duration() -> None:
    clock = Clock(2.0, 0.0, lambda: None, 1000.0)
    assert [clock.wish(now) for now in (1000.0, 1119.0, 1120.0)] == [0, 0, Wish.STOP_DURATION]
    assert Clock(2.0, 5.0, lambda: 1100.0, 1000.0).wish(1120.0) == Wish.STOP_DURATION  # a job is not requeued for it


def test_a_clock_that_is_set_moves_no_limit_but_the_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """--exit-duration-minutes and --save-interval-minutes count seconds; the end of the job is a time of day."""
    wall = time.time
    for minutes, jump, wanted in ((60.0, 7200.0, 0), (60.0, -7200.0, 0)):
        wishes = Wishes(clock=Clock(minutes, 0.0, lambda: None, wall(), save_minutes=30.0))
        monkeypatch.setattr(time, "time", lambda jump=jump: wall() + jump)
        assert wishes.now() == wanted
        monkeypatch.setattr(time, "time", wall)
    job = Wishes(clock=Clock(0.0, 5.0, lambda: wall() + 600))
    assert job.now() == Wish.CONTINUE
    monkeypatch.setattr(time, "time", lambda: wall() + 360)
    assert job.now() == Wish.STOP_JOB_END


def test_a_launch_begins_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STARTED, "900.5")
    assert launched() == 900.5
    monkeypatch.delenv(STARTED)
    assert abs(launched() - time.time()) < 60


def test_folders_of_killed_agents_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of agents that live, and of others, stay."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    alive = agent_notes.make_folder()
    for killed in ("megazero-agent-1", "megazero-agent-2", "other"):
        (tmp_path / killed).mkdir()
        (tmp_path / killed / "began").touch()
    second = agent_notes.make_folder()
    assert {*tmp_path.iterdir()} == {tmp_path / "other", alive, second}


def test_a_save_is_due_when_its_time_has_passed_since_the_last() -> None:
    """--save-interval-minutes."""
    clock = Clock(0.0, 0.0, lambda: None, save_minutes=0.5)
    assert clock.wish(time.time()) == Wish.CONTINUE
    clock.saved(1000.0)
    assert [clock.wish(now) for now in (1000.0, 1029.0, 1030.0, 1031.0)] == [0, 0, Wish.SAVE, Wish.SAVE]
    clock.saved(1031.0)
    assert [clock.wish(now) for now in (1060.0, 1061.0)] == [Wish.CONTINUE, Wish.SAVE]
    assert Clock(0.0, 0.0, lambda: None).wish(1e10) == Wish.CONTINUE


def test_the_end_of_the_job_is_asked_for_again_before_it_is_believed() -> None:
    """The job got more time."""
    ends = iter([10_000.0, 20_000.0, 20_000.0])
    clock = Clock(0.0, 5.0, lambda: next(ends))
    assert [clock.wish(now) for now in (9_699.0, 9_700.0, 19_699.0, 19_700.0)] == [0, 0, 0, Wish.STOP_JOB_END]


def test_a_job_without_a_limit_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"--exit-before-minutes 5: this is no SLURM job with a time limit; use --exit-d"
    ):
        Clock(0.0, 5.0, lambda: None)


def test_the_first_signal_is_noted_and_the_second_interrupt_is_not() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with Signals() as signals:
        assert signal.getsignal(signal.SIGTERM) == before[0]
        signals.joined()
        assert Wishes(signals).now() == Wish.CONTINUE
        os.kill(os.getpid(), signal.SIGINT)
        assert Wishes(signals).now() == Wish.STOP_SIGINT
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_the_first_interrupt_is_answered_while_the_main_thread_is_busy_outside_python() -> None:
    """It is in a C function, which returns when the answer is printed. A second interrupt prints nothing here."""
    answers, printed, busy = list[str](), threading.Event(), ctypes.create_string_buffer(64)  # zeros: a free mutex
    lock, unlock = ctypes.CDLL(None).pthread_mutex_lock, ctypes.CDLL(None).pthread_mutex_unlock
    in_time = []

    class Answer(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            answers.append(record.getMessage())
            printed.set()

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        in_time.append(printed.wait(30))
        unlock(busy)

    handler, other = Answer(), threading.Thread(target=interrupt)
    log.addHandler(handler)
    try:
        with Signals("a second one") as signals:
            signals.promise = "the promise"
            lock(busy)
            other.start()
            lock(busy)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
    finally:
        log.removeHandler(handler)
        other.join()
    assert in_time == [True] and answers == ["SIGINT: the promise. a second one"]


def test_interrupts_name_the_checkpoint_that_a_resume_takes(tmp_path: Path) -> None:
    assert again_words(False, "1:2") == Signals().again == "Press Ctrl-C again to stop at once, without saving"
    launched = "The launcher kills ranks that have not ended after"
    assert [again_words(True, elastic) for elastic in ("", "1:2")] == [f"{launched} 30 s", f"{launched} 10 minutes"]
    assert training_promise("S") == "finishing this step, then saving to --save S"
    assert training_promise("").endswith("then stopping; nothing is saved, because --save is not given")

    def said(**groups: object) -> str:
        return interrupted_words(replace(Config(), **groups))

    saved = CheckpointConfig(save=str(tmp_path))
    assert said() == "interrupted without saving: --save is not given"
    assert said(checkpoint=saved) == f"interrupted without saving: --save {tmp_path} has no checkpoint"
    tensor = LocalShard((1,), (0,), (1,), 0, 1, torch.zeros(1))
    path = checkpoint.save(tmp_path, 4, {"model.w": tensor}, {})
    newest = f"the newest checkpoint in --save {tmp_path} is iter_0000004; --load {tmp_path} resumes from it"
    assert said(checkpoint=saved) == f"interrupted without saving: {newest}"
    (path / "manifest.json").unlink()
    assert said(checkpoint=saved).startswith(f"interrupted without saving: --save {tmp_path} cannot be read: --load ")
    for groups in ({"plan": PlanConfig(plan=True)}, {"evaluation": EvaluationConfig(eval_only=True)}):
        assert said(checkpoint=saved, **groups) == "interrupted"


def test_the_stop_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the run also if nodes come back at the same time; touched while the ranks agree, it is seen later."""
    wishes = Wishes(stop_file=tmp_path / "stop")
    monkeypatch.setenv(agent_notes.FOLDER, str(tmp_path))
    agent_notes.leave(agent_notes.CHANGED, "1")
    assert wishes.now() == Wish.STOP_NODES
    (tmp_path / "stop").touch()
    wishes.obey(Wish.STOP_NODES)
    assert wishes.now() == Wish.STOP_FILE
    wishes.obey(Wish.STOP_FILE)
    assert wishes.now() == Wish.STOP_NODES


def test_a_stop_file_may_be_a_folder_or_a_link(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The run has ended: a folder that cannot be deleted is a warning."""
    stop, target = tmp_path / "stop", tmp_path / "target"
    wishes = Wishes(stop_file=stop)
    target.touch()
    for make in (stop.mkdir, lambda: os.mkfifo(stop), lambda: stop.symlink_to(target)):
        make()
        assert wishes.now() == Wish.STOP_FILE
        wishes.obey(Wish.STOP_FILE)
        assert wishes.now() == Wish.CONTINUE and target.exists()
    (stop / "full").mkdir(parents=True)
    wishes.obey(Wish.STOP_FILE)
    assert f"{stop}: Directory not empty. Delete it, or the next start stops at once" in caplog.text


def test_outside_a_job_there_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert scheduler.job_end() is None
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("PATH", "/nowhere")
    assert scheduler.job_end() is None


def test_a_stopped_run_names_the_command_that_resumes_it() -> None:
    def said(**options: object) -> str:
        return stopped_words(31, "SIGINT", CheckpointConfig(**options))

    assert said(save="a") == "stopped after iteration 31 by SIGINT: saved; the same command with --load a resumes it"
    assert said(save="a", load="./a").endswith("saved; the same command resumes it")
    assert said(save="a", load="b", finetune=True).endswith(
        "the same command without --finetune with --load a resumes it"
    )
    assert stopped_words(31, "SIGINT", None) == "stopped after iteration 31 by SIGINT: nothing saved"
