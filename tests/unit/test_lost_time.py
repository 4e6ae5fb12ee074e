"""Goodput of a run from the files of its log folder, with numbers worked out by hand."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from megazero.observe.loggers import MetricsFile
from megazero.observe.report.lost_time import goodput_line, spent
from megazero.observe.report.page import page
from megazero.observe.report.runs import read_run
from megazero.observe.start_clock import Lost, StartClock, process_start


def start(at: float, iteration: int, **seconds: float) -> dict[str, Any]:
    return {"event": "start", "at": at, "iteration": iteration, "seconds": seconds, "lost_iterations": 0} | {
        "lost_seconds": 0.0,
        "down_seconds": 0.0,
    }


def write(folder: Path, events: list[dict[str, Any]], seconds: list[float], written: float) -> None:
    """seconds: of every step, in the order of iterations."""
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    lines = [{"iteration": n, "loss": 2.0, "step_seconds": each} for n, each in enumerate(seconds, start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    os.utime(folder / "metrics.jsonl", (written, written))


def test_each_second_has_one_cause(tmp_path: Path) -> None:
    """Start at 1000, after 6 s; killed; again at 1200, after 10 s without a process and 8 s; the end at 1300.

    The run took 306 s: 4 steps of 50 s are kept, 30 s of steps were repeated. 14 s of starts and 10 s without a process
    leave 52 s.
    """
    first = start(1000.0, 0, process=2.0, joining=4.0)
    again = start(1200.0, 2, process=2.5, joining=5.5) | {"lost_iterations": 1, "lost_seconds": 30.0}
    events = [first, again | {"down_seconds": 10.0}, {"event": "end", "at": 1300.0, "iteration": 4, "why": "done"}]
    write(tmp_path, events, [50.0] * 4, written=1290.0)
    found = spent(read_run(tmp_path))
    assert found == {
        "steps that are kept": 200.0,
        "steps computed again": 30.0,
        "no process": 10.0,
        "start: process": 4.5,
        "start: joining": 9.5,
        "saves, evaluation, others": 52.0,
    }
    assert goodput_line(read_run(tmp_path)) == (
        "65.4% of 5:06 in steps that are kept; steps computed again 0:30, no process 0:10, start: process 0:04, start: "
        "joining 0:10, saves, evaluation, others 0:52"
    )
    shown = page(read_run(tmp_path))
    for words in ("Time of the run", "steps computed again", "0:30, 9.8%", "3:20, 65.4%"):
        assert words in shown


def test_a_run_without_an_end_lasts_to_its_last_record(tmp_path: Path) -> None:
    write(tmp_path, [start(1000.0, 0, process=10.0)], [40.0, 45.0], written=1090.0)
    found = spent(read_run(tmp_path))
    assert (found["steps that are kept"], found["start: process"]) == (85.0, 10.0)
    assert sum(found.values()) == 100.0


def test_folders_of_older_versions_have_no_causes(tmp_path: Path) -> None:
    older = {"event": "start", "time": "2026-10-01 10:00:00 UTC", "iteration": 0}
    write(tmp_path, [older, start(1200.0, 1, process=1.0)], [50.0] * 2, written=1290.0)
    run = read_run(tmp_path)
    assert spent(run) == {} and goodput_line(run) == "" and "Time of the run" not in page(run)


def test_lines_that_a_resume_cuts_are_counted(tmp_path: Path) -> None:
    """The torn line of a crash has no step."""
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"iteration": n, "step_seconds": float(n)}) for n in range(1, 6)]
    path.write_text("\n".join([*lines, '{"iteration": 6, "st']) + "\n")
    os.utime(path, (5000.0, 5000.0))
    file = MetricsFile(path, 3)
    assert file.lost == Lost(iterations=2, seconds=9.0, until=5000.0)
    file.close()
    fresh = MetricsFile(path, 0)
    assert fresh.lost == Lost()
    fresh.close()


def test_a_clock_divides_the_time_since_the_process_started() -> None:
    assert 0 < process_start() <= time.time()
    clock = StartClock(began=time.time() - 100)
    clock.mark("process")
    clock.mark("model")
    assert list(clock.parts) == ["process", "model"]
    assert 100 <= clock.parts["process"] < 200 > clock.parts["model"]
