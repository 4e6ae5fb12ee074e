"""The speed to expect: the share of their plans' speed that published runs reached, most of them less than all."""

import functools
import math
import statistics
import tomllib
from pathlib import Path
from typing import NamedTuple

# run -> its share; `python -m benchmarks.reports.paper planned` writes the file
PUBLISHED = Path(__file__).with_name("published.toml")


class Reached(NamedTuple):
    """Shares of the planned speed.

    Attributes:
        median: of the published runs.
        least, most: of any of them, rounded outward to whole percents.
        runs: their number.
    """

    median: float
    least: float
    most: float
    runs: int

    def of(self, speed: float) -> tuple[float, float, float]:
        """Return the expected speed of a planned one, and its least and most."""
        return speed * self.median, speed * self.least, speed * self.most

    def slowed(self, seconds: float) -> tuple[float, float, float]:
        """Return the expected duration of a planned one, and its least and most."""
        return seconds / self.median, seconds / self.most, seconds / self.least


@functools.cache
def reached() -> Reached:
    """Return the shares that published runs reached."""
    shares = tomllib.loads(PUBLISHED.read_text(encoding="utf-8")).values()
    least, most = math.floor(100 * min(shares)) / 100, math.ceil(100 * max(shares)) / 100
    return Reached(statistics.median(shares), least, most, len(shares))
