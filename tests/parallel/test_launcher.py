"""The launcher of ranks, as tests and benchmarks use it: results in order, and errors at once, with their cause."""

import datetime
import os
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import Forked, Group, Program, RankError, Ranks


def total(rank: int, number: int) -> tuple[int, int]:
    """(rank, the sum of rank + number over all ranks)"""
    x = torch.tensor(rank + number)
    dist.all_reduce(x)
    return rank, int(x)


def fail(rank: int, how: str) -> None:
    """Rank 1 raises or ends; rank 0 waits for ever, outside the group, whose end would reach it."""
    if rank == 1:
        if how == "raises":
            raise ValueError("rank 1 does not want to")
        print("last words", flush=True)
        os._exit(3)
    threading.Event().wait()


def pid(rank: int) -> int:
    return os.getpid()


def murmur(rank: int) -> None:
    print("not flushed", rank)


def two_groups(rank: int, timeout_minutes: int) -> list[str]:
    """Names of two groups of all ranks, over each of which a sum is right."""
    timeout = datetime.timedelta(minutes=timeout_minutes)
    groups = [dist.new_group([0, 1], timeout=timeout) for _ in range(2)]
    for group in groups:
        x = torch.tensor(rank + 1)
        dist.all_reduce(x, group=group)
        assert int(x) == 3
    return [group.group_name for group in groups]


def leave_in_flight(rank: int) -> None:
    """Begin to exchange 16 MiB with the other rank, over a group that `two_groups` uses."""
    group = dist.new_group([0, 1], timeout=datetime.timedelta(minutes=7))
    for start in (dist.irecv, dist.isend):
        start(torch.zeros(1 << 22), 1 - rank, group)


@pytest.fixture(scope="module", params=["forked", pytest.param("program", marks=pytest.mark.slow)])
def pool(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    start = Forked(["torch"]) if request.param == "forked" else Program(env={"OMP_NUM_THREADS": "1"})
    pool = Ranks(2, start, reuse_groups=True)
    yield pool
    pool.stop()


def test_results_come_in_the_order_of_ranks_and_processes_stay(pool: Ranks) -> None:
    assert pool.run(total, 10) == [(0, 21), (1, 21)]
    assert pool.run(pid) == pool.run(pid)


@pytest.mark.parametrize(("how", "said"), [("raises", "rank 1 does not want to"), ("ends", "rank 1:\nit ended")])
def test_an_error_is_raised_at_once_and_the_next_call_starts_new_ranks(pool: Ranks, how: str, said: str) -> None:
    before = pool.run(pid)
    with pytest.raises(RankError, match=said):
        pool.run(fail, how)
    assert pool.run(total, 0) == [(0, 1), (1, 1)]
    assert not set(before) & set(pool.run(pid))


def test_an_interrupted_call_leaves_no_results_to_the_next(pool: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that pytest stops at its limit of seconds is interrupted so."""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("tests.helpers.ranks.wait", Mock(side_effect=KeyboardInterrupt))
        pool.run(total, 10)
    assert pool.run(total, 0) == [(0, 1), (1, 1)]


def test_a_function_uses_the_groups_of_the_one_before(pool: Ranks) -> None:
    """Each of its own groups once, and none that has another time-out."""
    first, again, other = (pool.run(two_groups, minutes)[0] for minutes in (7, 7, 8))
    assert first == again and len({*first, *other}) == 4


def test_messages_in_flight_arrive_before_the_next_function(pool: Ranks) -> None:
    for _ in range(2):
        pool.run(leave_in_flight)
        assert pool.run(two_groups, 7)


def test_groups_that_are_too_many_are_ended(pool: Ranks) -> None:
    first = pool.run(two_groups, 7)[0]
    for minutes in range(10, 32):
        pool.run(two_groups, minutes)
    assert pool.run(two_groups, 7)[0] != first


@pytest.mark.second
def test_what_a_rank_printed_is_in_the_log_when_it_ends(tmp_path: Path) -> None:
    """One that ends at once, without the end of its groups."""
    started: list[Path] = []

    class Logged(Program):
        def __call__(self, group: Group, connection: Connection, log: Path) -> Any:
            started.append(tmp_path / "log")
            return super().__call__(group, connection, started[-1])

    pool = Ranks(1, Logged(env={"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}), reuse_groups=True)
    pool.run(murmur)
    pool.stop()
    assert started[0].read_text() == "not flushed 0\n"


@pytest.mark.slow
def test_ranks_that_hang_are_named() -> None:
    pool = Ranks(2, Program(sys.executable, env={"OMP_NUM_THREADS": "1"}), seconds=0.0)
    with pytest.raises(RankError, match=r"ranks \[0, 1\] did not answer in 0 s"):
        pool.run(pid)
