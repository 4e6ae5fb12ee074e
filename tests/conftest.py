"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.ranks import Ranks

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """ranks(world) -> a pool of that many gloo ranks, kept for the session."""
    pools: dict[int, Ranks] = {}

    def get(world: int) -> Ranks:
        return pools.setdefault(world, Ranks(world))

    yield get
    for pool in pools.values():
        pool.stop()
