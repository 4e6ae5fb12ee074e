"""Line charts of report.html, as pixels of an SVG that the page's template draws.

matplotlib would take longer than a short run, and the core installation, whose runs write reports too, lacks it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from megazero.observe.report.runs import Curve, short, thin

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 618, 10, 260  # edges of the axes


class Line(NamedTuple):
    """A curve and its style. `color` is a number of the style sheet's series."""

    label: str  # "": not in the legend
    curve: Curve
    color: int
    faint: bool = False
    points: bool = False


class Chart(NamedTuple):
    """A chart in pixels.

    Attributes:
        x_ticks, y_ticks: pixel and text.
        marks: pixel and meaning of vertical lines.
        lines: each with its points.
    """

    title: str
    x_label: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    marks: list[tuple[float, str]]
    lines: list[tuple[Line, list[tuple[float, float]]]]


def line_chart(
    lines: Sequence[Line],
    title: str,
    x_label: str,
    *,
    log: bool = False,
    from_zero: bool = False,
    marks: Sequence[tuple[float, str]] = (),
    y_format: Callable[[float], str] = short,
) -> Chart | None:
    """Lay out lines over one axis; None if none has a point.

    Args:
        log: logarithmic y if all values are above 0.
        from_zero: the y axis begins at 0.
        marks: place and meaning of vertical lines.
    """
    lines = [line for line in lines if len(line.curve.x)]
    if not lines:
        return None
    xs, ys = (np.concatenate([getattr(line.curve, axis) for line in lines]) for axis in "xy")
    log = log and bool(ys.min() > 0)
    to_scale: Callable[[np.ndarray | float], np.ndarray] = np.log10 if log else np.asarray
    left, right = _limits(xs, 0.0)
    low, high = _limits(np.append(ys, 0.0) if from_zero else to_scale(ys), 0.04)
    low = 0.0 if from_zero else low

    def x_at(x: np.ndarray | float) -> list[float]:
        return np.round(LEFT + (np.atleast_1d(x) - left) / (right - left) * (RIGHT - LEFT), 1).tolist()

    def y_at(y: np.ndarray | float) -> list[float]:
        return np.round(BOTTOM + (to_scale(np.atleast_1d(y)) - low) / (high - low) * (TOP - BOTTOM), 1).tolist()

    drawn = [(line, thin(line.curve)) for line in lines]
    return Chart(
        title,
        x_label,
        [(*x_at(tick), short(tick)) for tick in ticks(left, right)],
        [(*y_at(tick), y_format(tick)) for tick in (log_ticks(10**low, 10**high) if log else ticks(low, high))],
        [(*x_at(place), meaning) for place, meaning in marks if left <= place <= right],
        [(line, list(zip(x_at(x), y_at(y), strict=True))) for line, (x, y) in drawn],
    )


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round values between two limits: multiples of 1, 2 or 5 times a power of ten."""
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(step * factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= most)
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten between two limits; with too few of them, also round multiples of them."""
    exponents = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
    for factors in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        found = [factor * 10.0**n for n in exponents for factor in factors if low <= factor * 10.0**n <= high]
        if len(found) > 2:
            return found[:: -(-len(found) // 8)]
    return [tick for tick in ticks(low, high) if tick > 0]


def _limits(values: np.ndarray, margin: float) -> tuple[float, float]:
    """Return the least and the greatest value, moved apart by a margin; a width for a single value."""
    low, high = float(values.min()), float(values.max())
    width = high - low
    if not width:
        width, margin = abs(high) * 0.1 or 1.0, 0.5
    return low - margin * width, high + margin * width
