"""A few of the kills and damages that `make chaos` repeats by the hundred, and which compare losses and files."""

import pytest

from tests.chaos import damages, full_disks, kills


@pytest.mark.slow
def test_killed_runs_have_the_curve_of_one_that_was_not() -> None:
    kills(4, seed=7)  # asserts each loss, checkpoint, exit code and message


@pytest.mark.slow
def test_runs_with_full_disks_fail_with_a_sentence_and_go_on() -> None:
    assert full_disks(3, seed=3)["failed runs"] > 0


@pytest.mark.slow
def test_every_damage_is_found() -> None:
    assert damages(60, seed=1).keys() == {"bit", "cut", "gone", "zeros"}
