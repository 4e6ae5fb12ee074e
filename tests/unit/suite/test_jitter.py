"""The tool that stops random processes, on real ones."""

import os
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

from tests import jitter
from tests.helpers.programs import descendants


def wait(happened: Callable[[], bool]) -> None:
    while not happened():
        time.sleep(0.01)


def test_a_process_that_others_have_stopped_is_left_alone() -> None:
    parent = subprocess.Popen(["bash", "-c", "sleep 1000 & sleep 1000 & sleep 1000 & sleep 1000 & wait"])
    stops = jitter.Jitter(parent.pid, seed=1)
    try:
        wait(lambda: len(descendants(parent.pid)) == 5)
        frozen, *running = descendants(parent.pid)[1:]
        os.kill(frozen, signal.SIGSTOP)
        wait(lambda: jitter.state(frozen) == "T")
        wait(
            lambda: stops.turn() or stops.count == 1
        )  # none while others have stopped the rest, as a loaded machine may
        (stopped,) = stops.stopped
        assert stopped in running
        wait(lambda: jitter.state(stopped) == "T")
        stops.end()
        wait(lambda: jitter.state(stopped) != "T")
        assert not stops.stopped and jitter.state(frozen) == "T"
    finally:
        for pid in reversed(descendants(parent.pid)):
            os.kill(pid, signal.SIGKILL)
        parent.wait()
    assert jitter.state(parent.pid) == ""


def test_the_exit_status_is_the_commands(capfd: pytest.CaptureFixture[str]) -> None:
    assert jitter.run(["bash", "-c", "exit 7"], seed=5) == 7
    assert "seed 5; exit status 7" in capfd.readouterr().out
