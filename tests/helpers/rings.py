"""The two rings of the suite: the default tests, and those marked `second`, which protect against rarer regressions."""

from collections.abc import Iterable
from typing import Any

import pytest

SECOND = pytest.mark.second


def by_default(cases: Iterable[Any], *places: int) -> list[Any]:
    """Return parameters of a test. Cases at other places than `places` are marked `second`.

    A plain tuple has the values of several parameters.
    """
    found = list(cases)
    assert set(places) <= set(range(len(found)))
    return [
        pytest.param(*(case if type(case) is tuple else (case,)), marks=() if place in places else SECOND)
        for place, case in enumerate(found)
    ]
