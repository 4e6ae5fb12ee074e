"""Fixtures for all tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # triton reads it when it is imported: its kernels run on the CPU

from benchmarks.launcher import Forked, Ranks
from tests.helpers.programs import PRELOADED

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of ranks first: xdist gives the first part to one worker, which then has the only pools."""
    items.sort(key=lambda item: "ranks" not in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """ranks(world) -> a pool of that many gloo ranks, kept for the session."""
    start = Forked(PRELOADED)
    pools: dict[int, Ranks] = {}

    def get(world: int) -> Ranks:
        return pools.setdefault(world, Ranks(world, start, reuse_groups=True))

    yield get
    for pool in pools.values():
        pool.stop()
