"""tests/silent_bugs.toml fits the code."""

import pytest

from tests.helpers.planted import planted
from tests.helpers.silent_bugs import SilentBug, read_bugs


@pytest.mark.parametrize("bug", [pytest.param(bug, id=bug.where[0]) for bug in read_bugs()])
def test_every_bug_can_still_be_planted(bug: SilentBug) -> None:
    """Its text occurs once in its function; else `find` must follow the code."""
    with planted(bug.fault):
        pass
    assert bug.wrong and bug.ours and (bug.date if bug.read else True)
