"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from benchmarks.launcher import Forked, Ranks
from tests.helpers.programs import PRELOADED

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """ranks(world) -> a pool of that many gloo ranks, kept for the session."""
    start = Forked(PRELOADED)
    pools: dict[int, Ranks] = {}

    def get(world: int) -> Ranks:
        return pools.setdefault(world, Ranks(world, start, separate=True))

    yield get
    for pool in pools.values():
        pool.stop()
