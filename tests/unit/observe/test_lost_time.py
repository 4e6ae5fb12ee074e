"""Goodput of a run from the files of its log folder, with numbers worked out by hand."""

import json
import os
import platform
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megazero.engine.model.stage import declare
from megazero.flags.cli import read
from megazero.flags.config import Config
from megazero.flags.flag_names import with_values
from megazero.flags.resolve import resolve
from megazero.observe.events import RunEvents
from megazero.observe.loggers import MetricsFile
from megazero.observe.pauses import Pauses
from megazero.observe.report.lost_time import goodput_line, spent
from megazero.observe.report.page import page
from megazero.observe.report.runs import read_run
from megazero.observe.start_clock import Lost, StartClock, process_start


def start(at: float, iteration: int, **seconds: float) -> dict[str, Any]:
    return {"event": "start", "at": at, "iteration": iteration, "seconds": seconds, "lost_iterations": 0} | {
        "lost_seconds": 0.0,
        "down_seconds": 0.0,
    }


def write(folder: Path, events: list[dict[str, Any]], records: list[dict[str, Any]], first: int = 1) -> None:
    """records: of iterations `first` and later."""
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    lines = [{"iteration": n, "loss": 2.0, **each} for n, each in enumerate(records, start=first)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_each_second_has_one_cause(tmp_path: Path) -> None:
    """Start at 1000, after 6 s; killed; again at 1200, after 10 s without a process and 8 s; the end at 1300.

    The run took 306 s: 4 steps of 50 s are kept, 30 s of steps were repeated. 14 s of starts and 10 s without a process
    leave 52 s: 11 s are saves (2 + 3 + 6), 7 s evaluation, 1 s a copy to memory, and 33 s have no known cause.
    """
    first = start(1000.0, 0, process=2.0, joining=4.0)
    again = start(1200.0, 2, process=2.5, joining=5.5) | {"lost_iterations": 1, "lost_seconds": 30.0}
    end = {"event": "end", "at": 1300.0, "iteration": 4, "why": "done", "pause_seconds": {"save": 6.0}}
    records: list[dict[str, Any]] = [{"step_seconds": 50.0, "at": 1060.0 + 60.0 * n} for n in range(4)]
    records[1]["pause_seconds"] = {"save": 2.0, "evaluation": 7.0}
    records[3]["pause_seconds"] = {"save": 3.0, "memory_save": 1.0}
    write(tmp_path, [first, again | {"down_seconds": 10.0}, end], records)
    found = spent(read_run(tmp_path))
    assert {cause: seconds for cause, seconds in found.items() if seconds} == {
        "steps that are kept": 200.0,
        "steps computed again": 30.0,
        "no process": 10.0,
        "start: process": 4.5,
        "start: joining": 9.5,
        "saves that stop training": 11.0,
        "saves to memory that stop training": 1.0,
        "evaluation": 7.0,
        "all else": 33.0,
    }
    assert goodput_line(read_run(tmp_path)) == (
        "65.4% of 5:06 in steps that are kept; starts 4.6%, steps computed again 9.8%, no process 3.3%, saves that "
        "stop training 3.6%, evaluation 2.3%, all else 10.8%"
    )
    shown = page(read_run(tmp_path))
    for words in ("Time of the run", "steps computed again", "0:30, 9.8%", "3:20, 65.4%", "<b>65.4%</b>"):
        assert words in shown
    assert "no process 10.0 s, process 2.5 s, joining 5.5 s; 1 iteration of 30.0 s computed again" in shown


def test_every_resume_loses_time_of_its_own(tmp_path: Path) -> None:
    """Three starts of 2, 3 and 5 s; 30 and 7 s computed again, 10 and 21 s without a process."""
    events = [start(1000.0, 0, process=2.0), start(1200.0, 2, process=3.0), start(1400.0, 3, joining=5.0)]
    events[1] |= {"lost_iterations": 1, "lost_seconds": 30.0, "down_seconds": 10.0}
    events[2] |= {"lost_iterations": 2, "lost_seconds": 7.0, "down_seconds": 21.0}
    write(tmp_path, events, [{"step_seconds": 50.0, "at": 1100.0 + 200.0 * n} for n in range(3)])
    found, shown = spent(read_run(tmp_path)), page(read_run(tmp_path))
    assert {cause: found[cause] for cause in ("steps computed again", "no process", "start: process")} == {
        "steps computed again": 37.0,
        "no process": 31.0,
        "start: process": 5.0,
    }
    assert found["steps that are kept"] == 150.0 and sum(found.values()) == 502.0
    assert "no process 10.0 s, process 3.0 s; 1 iteration of 30.0 s computed again" in shown
    assert "no process 21.0 s, joining 5.0 s; 2 iterations of 7.0 s computed again" in shown


def test_a_run_without_an_end_lasts_to_its_last_record(tmp_path: Path) -> None:
    records = [{"step_seconds": 40.0, "at": 1041.0}, {"step_seconds": 45.0, "at": 1090.0}]
    write(tmp_path, [start(1000.0, 0, process=10.0)], records)
    assert goodput_line(read_run(tmp_path)) == ""  # shorter than an hour, and nothing was lost
    assert "goodput" not in page(read_run(tmp_path))
    found = spent(read_run(tmp_path))
    assert (found["steps that are kept"], found["start: process"]) == (85.0, 10.0)
    assert sum(found.values()) == 100.0
    assert "Resumes" not in page(read_run(tmp_path))


def test_an_hour_without_a_loss_has_a_goodput(tmp_path: Path) -> None:
    for seconds, words in ((3589.0, ""), (3591.0, "99.7% of 1:00:01 in steps that are kept")):
        write(tmp_path, [start(1000.0, 0, process=10.0)], [{"step_seconds": seconds, "at": 1000.0 + seconds}])
        assert goodput_line(read_run(tmp_path)) == words
        assert ("goodput: time in" in page(read_run(tmp_path))) == bool(words)


def test_a_log_may_begin_in_the_middle_of_a_run(tmp_path: Path) -> None:
    """A resume at iteration 1,000 with a --log-dir of its own: nothing is counted for the iterations before it."""
    records = [{"step_seconds": 40.0, "tokens_per_second": 2.0, "at": 1040.0 + 40 * n} for n in range(3)]
    write(tmp_path, [start(1000.0, 1000, process=10.0)], records, first=1001)
    run = read_run(tmp_path)
    assert run.records[0]["iteration"] == 1001
    assert run.axes["tokens"].tolist() == [80.0, 160.0, 240.0]
    assert (3600 * run.axes["hours"]).round(9).tolist() == [40.0, 80.0, 120.0]
    assert spent(run) | {"all else": 0.0} == dict.fromkeys(spent(run), 0.0) | {
        "steps that are kept": 120.0,
        "start: process": 10.0,
    }
    shown = page(run)
    assert "1,003" in shown and "92.3%" in shown


def test_folders_of_older_versions_have_no_causes(tmp_path: Path) -> None:
    older = {"event": "start", "time": "2026-10-01 10:00:00 UTC", "iteration": 0}
    write(tmp_path, [older, start(1200.0, 1, process=1.0)], [{"step_seconds": 50.0}] * 2)
    run = read_run(tmp_path)
    assert spent(run) == {} and goodput_line(run) == "" and "Time of the run" not in page(run)


def test_steps_before_the_first_checkpoint_are_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An elastic run starts again at iteration 0: its files stay, and the next run's start replaces them."""
    path, config = tmp_path / "metrics.jsonl", with_values(Config(), {"log-dir": str(tmp_path)})

    def begin() -> tuple[RunEvents, Lost]:
        events, file = RunEvents(None, config, cast(Any, SimpleNamespace(rank=0))), MetricsFile(path, 0)
        events.about = {}
        events.start(0, file.lost)
        file.write({"iteration": 1, "loss": 2.0, "step_seconds": 40.0, "at": time.time()})
        file.close()
        return events, file.lost

    assert begin()[1] == Lost()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    events, lost = begin()
    assert (lost.iterations, lost.seconds) == (1, 40.0) and not (tmp_path / "metrics.previous.jsonl").exists()
    assert events.first_step(1)["recovery_seconds"] >= 0
    run = read_run(tmp_path)
    assert 0 <= run.start["down_seconds"] < 60
    assert spent(run)["steps computed again"] == spent(run)["steps that are kept"] == 40.0 and len(run.starts) == 2
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    assert begin()[1] == Lost() and len(read_run(tmp_path).starts) == 1


def test_a_resume_is_recorded_and_reported_with_its_own_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last record at 5060, an end at 5070, the process at 5100, its first step until 5112.5, the report at 5200."""
    (tmp_path / "events.jsonl").write_text('{"event": "start", "at": 5001}\n{"event": "end", "at": 5070}\n')
    given = read(f"--log-dir {tmp_path} --architecture mixtral --num-experts 3 --num-layers 2 --vocab-size 9".split())
    config, layout = resolve(given.config, 6, 0, declare)
    world = SimpleNamespace(hosts=["a", "a", "a", "b", "b", "b"])
    mesh: Any = SimpleNamespace(rank=0, layout=layout, device=torch.device("cpu"), world=world)
    clock, now = StartClock(began=5100.0), [5102.5]
    monkeypatch.setattr("time.time", lambda: now[0])
    clock.mark("process")
    events = RunEvents(given, config, mesh, clock, {"bytes_per_token": 3.5})
    events.start(7, Lost(iterations=3, seconds=45.0, until=5060.0), stage=2)
    assert events.first_step(7) == {} == events.first_step(9)
    now[0] = 5112.5
    clock.mark("first step")
    now[0], clock.mark = 5200.0, lambda part: None  # type: ignore[method-assign]
    parts = {"process": 2.5, "first step": 10.0}
    assert events.first_step(8) == {"start_seconds": parts, "recovery_seconds": 140.0}
    assert capsys.readouterr().out == (
        "resumed in 12.5 s: process 2.5 s, first step 10.0 s; 140.0 s after the last record; 3 iterations to compute "
        "again\n"
    )
    events.fail(8, OSError("no disk"))
    start, end = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()][2:]
    wanted = {
        "event": "start", "iteration": 7, "at": 5102.5, "time": "1970-01-01 01:25:02 UTC", "lost_iterations": 3,
        "lost_seconds": 45.0, "down_seconds": 30.0, "stage": 2, "seconds": {"process": 2.5}, "bytes_per_token": 3.5,
        "given": ["architecture", "log_dir", "num_experts", "num_layers", "vocab_size"],
    }  # fmt: skip
    assert {key: start[key] for key in wanted} == wanted and start["layout"]["dp"] == 6
    experts = 3 * 768 * config.model.expert_size  # elements of one
    assert start["parameters"] - start["active_parameters"] == 2 * (3 - config.model.moe_router_topk) * experts > 0
    shown = start["environment"]
    assert (shown["hosts"], shown["ranks"], shown["torch"]) == (["a", "b"], 6, torch.__version__)
    assert (
        shown["python"] == platform.python_version() and "cuda" not in shown and f"{os.cpu_count()} cores" in str(shown)
    )
    assert (end["event"], end["iteration"], end["at"], end["why"]) == ("end", 8, 5200.0, "OSError: no disk")


def test_lines_that_a_resume_cuts_are_counted(tmp_path: Path) -> None:
    """The torn line of a crash has no step. An evaluation of an earlier checkpoint stays, wherever it is."""
    path = tmp_path / "metrics.jsonl"
    lines = [{"iteration": n, "step_seconds": float(n), "at": 5000.0 + n} for n in range(1, 6)]
    lines[4]["pause_seconds"] = {"save": 0.5, "evaluation": 0.25}
    lines.insert(4, {"iteration": 2, "validation_loss": 3.0, "eval_seconds": 9.0})
    path.write_text("\n".join([*map(json.dumps, lines), '{"iteration": 6, "st']) + "\n")
    file = MetricsFile(path, 3)
    assert file.lost == Lost(iterations=2, seconds=9.75, until=5005.0)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [*lines[:3], lines[4]]
    file.close()
    MetricsFile(path, None).close()  # an evaluation
    assert len(path.read_text().splitlines()) == 4
    fresh = MetricsFile(path, 0)
    assert fresh.lost == Lost()
    fresh.close()


def test_pauses_are_taken_once() -> None:
    pauses = Pauses()
    assert pauses.take() == {}
    for _ in range(2):
        with pauses.of("save"):
            time.sleep(0.01)
    with pytest.raises(OSError), pauses.of("export"):
        raise OSError
    (taken,) = pauses.take().values()
    assert list(taken) == ["save", "export"] and taken["save"] >= 0.02 > taken["export"]
    assert pauses.take() == {}


def test_a_clock_divides_the_time_since_the_process_started() -> None:
    assert 0 < process_start() <= time.time()
    clock = StartClock(began=time.time() - 100)
    clock.mark("process")
    clock.mark("model")
    assert list(clock.parts) == ["process", "model"]
    assert 100 <= clock.parts["process"] < 200 > clock.parts["model"]


def test_events_are_written_to_a_file_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A FIFO is not waited for, and the target of a link is not touched: both are a warning."""
    target, events = tmp_path / "thesis.txt", tmp_path / "events.jsonl"
    target.write_text("a thesis")
    for make in (lambda: os.mkfifo(events), lambda: events.symlink_to(target)):
        make()
        begun = RunEvents(None, with_values(Config(), {"log-dir": str(tmp_path)}), cast(Any, SimpleNamespace(rank=0)))
        begun.about = {}
        begun.start(0, Lost())
        begun.end(0, "done", {})
        assert (
            caplog.text.count(f"events.jsonl lacks an event: {events}: it is a folder, a FIFO, a device, or a li") == 2
        )
        caplog.clear()
        events.unlink()
    assert target.read_text() == "a thesis"
