"""Line charts and heat maps of report.html, as pixels of an SVG that the page's template draws.

matplotlib would take longer than a short run, and the core installation, whose runs write reports too, lacks it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from megazero.observe.report.runs import Curve, short, thin

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 618, 10, 260  # edges of the axes
MOST_ROWS, MOST_COLUMNS = 64, 128  # of a heat map; it draws the largest of several values then
LOADS = (0.1, 0.5, 0.8, 1.25, 1.5, 2.0, 3.0, 5.0)  # limits of a heat map's colours; 1 is balanced


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
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    marks: list[tuple[float, str]]
    lines: list[tuple[Line, list[tuple[float, float]]]]


class HeatMap(NamedTuple):
    """A heat map of loads in pixels.

    Attributes:
        x_ticks, y_ticks: pixel and text.
        height: of a row.
        bands: number of a colour of the style sheet, its meaning, and its cells: left edge, middle and width.
    """

    title: str
    x_title: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    height: float
    bands: list[tuple[int, str, list[tuple[float, float, float]]]]


def line_chart(
    lines: Sequence[Line],
    title: str,
    *,
    log: bool = False,
    from_zero: bool = False,
    marks: Sequence[tuple[float, str]] = (),
    y_format: Callable[[float], str] = short,
) -> Chart | None:
    """Lay out curves over the iterations; None if none has a point.

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
        at = LEFT + (np.atleast_1d(x) - left) / (right - left) * (RIGHT - LEFT)
        return list(map(float, np.round(at, 1)))

    def y_at(y: np.ndarray | float) -> list[float]:
        at = BOTTOM + (to_scale(np.atleast_1d(y)) - low) / (high - low) * (TOP - BOTTOM)
        return list(map(float, np.round(at, 1)))

    drawn = [(line, thin(line.curve)) for line in lines]
    return Chart(
        title=title,
        x_ticks=[(x_at(tick)[0], short(tick)) for tick in ticks(left, right)],
        y_ticks=[
            (y_at(tick)[0], y_format(tick)) for tick in (log_ticks(10**low, 10**high) if log else ticks(low, high))
        ],
        marks=[(x_at(place)[0], meaning) for place, meaning in marks if left <= place <= right],
        lines=[(line, list(zip(x_at(x), y_at(y), strict=True))) for line, (x, y) in drawn],
    )


def heat_map(
    title: str, x_title: str, names: Sequence[str], values: np.ndarray, columns: tuple[float, float]
) -> HeatMap | None:
    """Lay out loads, relative to a balanced one; None if there are none.

    Args:
        names: of the rows.
        values: [rows, columns]; NaN: unknown, and not drawn.
        columns: the numbers of the first and the last column.
    """
    if not values.size or np.isnan(values).all():
        return None
    rows = _starts(len(values), MOST_ROWS)
    places = _starts(values.shape[1], MOST_COLUMNS)
    drawn = np.fmax.reduceat(np.fmax.reduceat(values, rows, 0), places, 1)
    colors = np.where(np.isnan(drawn), -1, np.searchsorted(LOADS, drawn, side="right"))
    edges = LEFT + np.append(places, values.shape[1]) / values.shape[1] * (RIGHT - LEFT)
    height = (BOTTOM - TOP) / len(rows)
    middles = TOP + height * (np.arange(len(rows)) + 0.5)
    cells: dict[int, list[tuple[float, float, float]]] = {color: [] for color in range(len(LOADS) + 1)}
    for row, middle in zip(colors, middles, strict=True):
        changes = [0, *(np.flatnonzero(np.diff(row)) + 1), len(row)]  # neighbours of one colour are one cell
        for first, last in itertools.pairwise(changes):
            if row[first] >= 0:
                left, right = np.round(edges[[first, last]], 1)
                cells[int(row[first])].append((left, round(middle, 1), round(right - left, 1)))
    low, high = columns
    labelled = ticks(low, high) if high > low else [low]
    spread = (RIGHT - LEFT) / (high - low + 1)
    return HeatMap(
        title=title,
        x_title=x_title,
        x_ticks=[(round(LEFT + (tick - low + 0.5) * spread, 1), short(tick)) for tick in labelled if tick == int(tick)],
        y_ticks=[(round(middles[at], 1), names[rows[at]]) for at in _starts(len(rows), 12)],
        height=round(0.97 * height, 2),  # a seam between rows
        bands=[(color, text, cells[color]) for color, text in enumerate(_band_texts()) if cells[color]],
    )


def _starts(count: int, most: int) -> np.ndarray:
    """Divide `count` places into at most `most` parts, and return the first place of each."""
    parts = min(count, most)
    return np.arange(parts) * count // parts


def _band_texts() -> list[str]:
    inner = [f"{low:g} to {high:g}" for low, high in itertools.pairwise(LOADS)]
    return [f"below {LOADS[0]:g}", *inner, f"from {LOADS[-1]:g}"]


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
