"""Fixtures for all tests."""

import contextlib
import gc
import importlib.util
import os
import re
import traceback
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

from tests.helpers.quick_exit import WORKERS

# isort: split
import megazero  # noqa: F401 - sets environment variables, which torch reads when it is imported

# isort: split
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # triton reads it when it is imported: its kernels run on the CPU

from megazero.optional import EXTRAS
from tests.helpers.cpu_seconds import CpuSeconds
from tests.helpers.parsers import remember_parsers
from tests.helpers.programs import PRELOADED
from tests.helpers.ranks import Forked, Ranks

MEMORY = Path("/dev/shm")  # Linux keeps these files in memory
ROOM = 1 << 30  # bytes; the tests need far less

if "TMPDIR" not in os.environ and MEMORY.is_dir():  # of `tmp_path`: no save waits for a disk
    file_system = os.statvfs(MEMORY)
    if file_system.f_bavail * file_system.f_frsize >= ROOM and not file_system.f_flag & os.ST_NOEXEC:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

torch.set_num_threads(int(os.environ.get("TEST_THREADS", "1")))  # tests/machines.py sets it

# Gloo's thread spins while another thread holds its connection's lock: for milliseconds, if the message's receiver took
# that thread's core when it woke up. Processes of this policy, which children inherit, do not: 40 % less system time.
with contextlib.suppress(OSError):  # a sandbox may refuse
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

remember_parsers()
START = Forked(PRELOADED)
POOLS: dict[int, Ranks] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-budget", type=float, default=0.0, help="fail if all tests take more CPU seconds than this")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        WORKERS.add(os.getpid())
    config.pluginmanager.register(CpuSeconds(config.getoption("--cpu-budget")))


def uses_ranks(item: pytest.Item) -> bool:
    return "ranks" in getattr(item, "fixturenames", ())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of ranks first: xdist gives the first part to one worker, which then has the only pools."""
    items.sort(key=lambda item: not uses_ranks(item))
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))


def pytest_collection_finish() -> None:
    """Leave modules and tests out of garbage collections, which are a seventh of the unit tests' time otherwise."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_unconfigure() -> None:
    if not WORKERS:  # which end without a report
        gc.unfreeze()  # else Triton's bindings report leaks


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not uses_ranks(item):  # idle ranks take memory, and their groups' threads wake up all the time
        stop_pools()


MISSING = re.compile(r"(?:needs the Python package |No module named ')(\w+)")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip a test that fails because an optional package is missing: here, or in a program that it runs."""
    error = call.excinfo.value if call.excinfo else None
    return skip_without_package((yield), item.path, (item.location[1] or 0) + 1, error)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return skip_without_package((yield), collector.path, 0)


def skip_without_package(report: Any, file: Path, line: int, error: BaseException | None = None) -> Any:
    """Skip a test that fails without a package, unless a row of its table (tests/helpers/table.py) fails with all."""
    if report.failed:
        rows = [" ".join(traceback.format_exception(row)) for row in rows_of(error)] or [report.longreprtext]
        absent = {package for package in EXTRAS if importlib.util.find_spec(package) is None}
        found = [absent.intersection(MISSING.findall(row)) for row in rows]
        if all(found):
            report.outcome, names = "skipped", ", ".join(sorted(set().union(*found)))
            report.longrepr = str(file), line, f"not installed: {names}"
    return report


def rows_of(error: BaseException | None) -> list[BaseException]:
    """Return the errors of a group of errors."""
    if not isinstance(error, BaseExceptionGroup):
        return []
    return [row for each in error.exceptions for row in rows_of(each) or [each]]


def stop_pools() -> None:
    """End all ranks; a pool that is used again starts new ones."""
    for pool in POOLS.values():
        pool.stop()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """ranks(world) -> a pool of that many gloo ranks, kept from test to test."""
    yield lambda world: POOLS.setdefault(world, Ranks(world, START, reuse_groups=True))
    stop_pools()
