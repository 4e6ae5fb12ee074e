"""CPU seconds of tests: those of ended and running children count, sums by folder, and the budget."""

import subprocess
import time
from types import SimpleNamespace

import pytest

from tests.helpers.cpu_seconds import NAME, CpuSeconds, cpu_seconds

WORK = "for ((i = 0; i < 50000; i++)); do :; done"  # more than two ticks of the clock on any CPU


def test_running_and_ended_children_count() -> None:
    before = cpu_seconds()
    subprocess.run(["bash", "-c", WORK], check=True)
    ended = cpu_seconds()
    assert ended - before >= 0.02
    child = subprocess.Popen(["bash", "-c", f"{WORK}; echo; read"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
    assert cpu_seconds() - ended >= 0.02
    child.communicate(b"\n")


def test_a_session_prints_its_folders_and_fails_above_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers and the process that prints: 4 CPU seconds."""
    monkeypatch.setattr(time, "process_time", lambda: 0.5)
    for budget, exceeded in ((0.0, False), (4.0, False), (3.9, True)):
        plugin, lines = CpuSeconds(budget), []
        for path, seconds in (("unit/test_a.py", 0.5), ("parallel/test_b.py", 2.0), ("unit/test_c.py", 0.5)):
            for when in ("setup", "call", "teardown"):
                report = SimpleNamespace(nodeid=f"tests/{path}::test", when=when, user_properties=[(NAME, seconds)])
                plugin.pytest_runtest_logreport(report)
        for worker in (1.5, 2.0):
            plugin.pytest_testnodedown(SimpleNamespace(workeroutput={NAME: worker}))
        session = SimpleNamespace(config=SimpleNamespace(), exitstatus=pytest.ExitCode.OK)
        plugin.pytest_sessionfinish(session)
        plugin.pytest_terminal_summary(
            SimpleNamespace(write_line=lambda line, lines=lines, **style: lines.append(line))
        )
        assert session.exitstatus == (pytest.ExitCode.TESTS_FAILED if exceeded else pytest.ExitCode.OK)
        assert lines[0] == "CPU seconds: 4 (parallel 2, unit 1, imports and collection 1)"
        assert lines[1:] == (["ERROR: more than --cpu-budget 3.9"] if exceeded else [])
