"""Heat maps of report.html, as pixels of an SVG that the page's template draws."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megazero.observe.report.runs import short

LEFT, RIGHT, TOP, BOTTOM = 64, 618, 10, 260  # edges of the axes
MOST_ROWS, MOST_COLUMNS = 64, 128  # of a heat map; it draws the largest of several values then
LOADS = (0.1, 0.5, 0.8, 1.25, 1.5, 2.0, 3.0, 5.0)  # limits of colours for loads of experts; 1 is balanced


class HeatMap(NamedTuple):
    """A heat map in pixels.

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


def heat_map(
    title: str,
    x_title: str,
    names: Sequence[str],
    values: np.ndarray,
    columns: tuple[float, float],
    limits: Sequence[float] = LOADS,
) -> HeatMap | None:
    """Lay out values; None if there are none.

    Args:
        names: of the rows.
        values: [rows, columns]; NaN: unknown, and not drawn.
        columns: the numbers of the first and the last column.
        limits: of colours, ascending, at most as many as those of loads.
    """
    if not values.size or np.isnan(values).all():
        return None
    rows = _starts(len(values), MOST_ROWS)
    places = _starts(values.shape[1], MOST_COLUMNS)
    drawn = np.fmax.reduceat(np.fmax.reduceat(values, rows, 0), places, 1)
    colors = np.where(np.isnan(drawn), -1, np.searchsorted(limits, drawn, side="right"))
    edges = LEFT + np.append(places, values.shape[1]) / values.shape[1] * (RIGHT - LEFT)
    height = (BOTTOM - TOP) / len(rows)
    middles = TOP + height * (np.arange(len(rows)) + 0.5)
    cells: dict[int, list[tuple[float, float, float]]] = {color: [] for color in range(len(limits) + 1)}
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
        bands=[(color, text, cells[color]) for color, text in enumerate(_band_texts(limits)) if cells[color]],
    )


def _starts(count: int, most: int) -> np.ndarray:
    """Divide `count` places into at most `most` parts, and return the first place of each."""
    parts = min(count, most)
    return np.arange(parts) * count // parts


def logarithmic_limits(values: np.ndarray) -> list[float]:
    """Return limits of colours that divide the range of the positive values evenly, with two digits."""
    positive = values[np.isfinite(values) & (values > 0)]
    if not len(positive):
        return [1.0]
    inner = np.geomspace(positive.min(), positive.max(), len(LOADS) + 2)[1:-1]
    return sorted({float(f"{limit:.2g}") for limit in inner})


def _band_texts(limits: Sequence[float]) -> list[str]:
    inner = [f"{low:g} to {high:g}" for low, high in itertools.pairwise(limits)]
    return [f"below {limits[0]:g}", *inner, f"from {limits[-1]:g}"]


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round values between two limits: multiples of 1, 2 or 5 times a power of ten."""
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(step * factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= most)
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
