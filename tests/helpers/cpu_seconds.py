"""CPU seconds of the tests: of each one, of each folder, and of the whole session.

Wall time depends on the load of a machine, CPU time hardly does. Each test's report has its CPU seconds as the user
property `cpu_seconds`, which --junitxml writes; a line at the end of the session has the sums.
"""

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.programs import descendants

NAME = "cpu_seconds"
STARTS = "imports and collection"
TICKS = os.sysconf("SC_CLK_TCK")  # per second


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of all processes that it started, running or ended.

    An ended process counts in its parent, which must be alive and have waited for it.
    """
    ticks = 0
    for pid in descendants(os.getpid()):
        with suppress(OSError):  # it has just ended
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))  # utime, stime, and those of ended children
    return ticks / TICKS if ticks else sum(os.times()[:4])  # without /proc: children that have ended


class CpuSeconds:
    """A plugin of pytest, in each worker and in the process that prints reports.

    Attributes:
        budget: CPU seconds of a session; if it takes more, it fails. 0: no limit.
    """

    def __init__(self, budget: float) -> None:
        self.budget = budget
        self.total = 0.0
        self.of_folders: defaultdict[str, float] = defaultdict(float)
        self._workers = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._before = cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report = yield
        if report.when == "teardown":
            report.user_properties.append((NAME, round(cpu_seconds() - self._before, 2)))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, seconds in report.user_properties:
            if name == NAME and report.when == "teardown":
                self.of_folders[Path(report.nodeid.partition("::")[0]).parent.name] += seconds

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._workers = True
        self.total += getattr(node, "workeroutput", {}).get(NAME, 0.0)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[NAME] = cpu_seconds()
            return
        self.total += time.process_time() if self._workers else cpu_seconds()
        if self.exceeded and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @property
    def exceeded(self) -> bool:
        return 0 < self.budget < self.total

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        rows = sorted(self.of_folders.items(), key=lambda row: -row[1])
        rows.append((STARTS, self.total - sum(self.of_folders.values())))
        words = ", ".join(f"{name} {seconds:.0f}" for name, seconds in rows)
        terminalreporter.write_line(f"CPU seconds: {self.total:.0f} ({words})")
        if self.exceeded:
            terminalreporter.write_line(f"ERROR: more than --cpu-budget {self.budget:g}", red=True)
