"""The range of the expected speed, and the plans of published runs that it comes from."""

import tomllib

import pytest

from benchmarks.reports.planned import compare, compare_case
from benchmarks.reports.published import TRAINED
from benchmarks.reports.searches import NARAYANAN_CASES
from megazero.planner.expected import PUBLISHED, reached

pytestmark = pytest.mark.second

SHARES = tomllib.loads(PUBLISHED.read_text())


def test_the_range_is_that_of_all_published_runs() -> None:
    """The file has every run. The least and the most, computed again, are those of the file, and in the range."""
    named = [f"{run.name}, {run.gpus} x {run.device}" for run in TRAINED]
    assert list(SHARES) == named + [f"{c.name.split(', ')[0]}, {c.gpus} x {c.device}" for c in NARAYANAN_CASES]
    found = reached()
    for end, name in ((found.least, min(SHARES, key=SHARES.get)), (found.most, max(SHARES, key=SHARES.get))):
        share = compare(TRAINED[named.index(name)]).reached
        assert f"{share:.3f}" == f"{SHARES[name]:.3f}" and abs(share - end) < 0.01
        assert found.least <= share <= found.most
    assert found.runs == 35 and sum(share < found.median for share in SHARES.values()) == 17


@pytest.mark.slow
def test_the_shares_are_those_of_the_plans_of_today() -> None:
    again = [*map(compare, TRAINED), *map(compare_case, NARAYANAN_CASES)]
    assert [f"{each.reached:.3f}" for each in again] == [f"{share:.3f}" for share in SHARES.values()]
