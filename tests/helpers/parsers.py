"""Command lines are read in a millisecond: tyro makes a parser of all flags once, not for each line (30 ms)."""

from collections.abc import Callable
from typing import Any

from tyro._parsers import ParserSpecification


class Remembered:
    """`ParserSpecification.from_callable_or_type`, whose results for whole command lines are kept."""

    def __init__(self, make: Callable[..., ParserSpecification]) -> None:
        self._make, self._made = make, dict[tuple[object, str | None, str], ParserSpecification]()

    def __call__(self, options: Any, **how: Any) -> ParserSpecification:
        if how["intern_prefix"]:  # a part of one
            return self._make(options, **how)
        # equality of the defaults would be that of 1, 1.0 and True
        key = options, how.get("description"), repr(how["default_instance"])
        if key not in self._made:
            self._made[key] = self._make(options, **how)
        return self._made[key]


def remember_parsers() -> None:
    """Have tyro use the parser of an earlier command line with the same defaults, in this process and its forks."""
    if not isinstance(ParserSpecification.from_callable_or_type, Remembered):
        made = Remembered(ParserSpecification.from_callable_or_type)
        ParserSpecification.from_callable_or_type = made  # type: ignore[method-assign,assignment]
