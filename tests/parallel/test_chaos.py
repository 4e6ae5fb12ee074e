"""A few of the kills and damages that `make chaos` repeats by the hundred."""

import pytest

from tests.chaos import damages, full_disks, kills


@pytest.mark.slow
def test_kills_at_random() -> None:
    assert kills(4, seed=7)["kills"] >= 4


@pytest.mark.slow
def test_full_disks_at_random() -> None:
    assert full_disks(3, seed=3)["full disks"] == 3


@pytest.mark.slow
def test_damages_at_random() -> None:
    assert sum(damages(60, seed=1).values()) > 50
