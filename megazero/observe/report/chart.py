"""Line charts as SVG text. Colours and fonts come from the page's style sheet, so light and dark are its matter.

Drawn here and not by matplotlib: a report is written at the end of every run, also of a core installation, which has no
matplotlib, and importing that takes longer than a short run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from megazero.observe.report.runs import Curve, short, thin

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 22, 10, 40


class Line(NamedTuple):
    """A curve as it is drawn. `color` is a number of the style sheet's series."""

    label: str  # "": not in the legend
    curve: Curve
    color: int
    faint: bool = False
    points: bool = False


class Scale(NamedTuple):
    """One axis: values from `low` to `high` on pixels from `first` to `last`."""

    low: float
    high: float
    first: float
    last: float
    log: bool = False

    def at(self, values: np.ndarray) -> np.ndarray:
        low, high, v = (np.log10(t) if self.log else t for t in (self.low, self.high, values))
        return self.first + (v - low) / (high - low) * (self.last - self.first)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round values between two: multiples of 1, 2 or 5 times a power of ten."""
    step = 10 ** math.floor(math.log10((high - low) / most))
    step = next(step * factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= most)
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten between two; with too few of them, also round multiples of them."""
    exponents = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
    for factors in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        found = [factor * 10.0**n for n in exponents for factor in factors if low <= factor * 10.0**n <= high]
        if len(found) > 2:
            return found[:: -(-len(found) // 8)]
    return [tick for tick in ticks(low, high) if tick > 0]


def line_chart(
    lines: Sequence[Line],
    title: str,
    x_label: str,
    *,
    log: bool = False,
    from_zero: bool = False,
    marks: Sequence[tuple[float, str]] = (),
    y_format: Callable[[float], str] = short,
) -> str:
    """Draw lines over one axis; an empty text if none has a point.

    Args:
        log: logarithmic y, where all values are above 0.
        from_zero: the y axis begins at 0.
        marks: (place, meaning) of vertical lines.
    """
    lines = [line for line in lines if len(line.curve.x)]
    if not lines:
        return ""
    xs = np.concatenate([line.curve.x for line in lines])
    ys = np.concatenate([line.curve.y for line in lines])
    log = log and bool(ys.min() > 0) and not from_zero
    x = Scale(*_range(float(xs.min()), float(xs.max()), 0.0), LEFT, WIDTH - RIGHT)
    low, high = _log_range(ys) if log else _range(0.0 if from_zero else float(ys.min()), float(ys.max()), 0.04)
    y = Scale(0.0 if from_zero else low, high, HEIGHT - BOTTOM, TOP, log)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">']
    parts += _axes(x, y, x_label, y_format)
    for place, meaning in marks:
        if x.low <= place <= x.high:
            at = float(x.at(np.array(place)))
            path = f'<path class="mark" d="M{at:.1f} {TOP}V{HEIGHT - BOTTOM}">'
            parts.append(f"{path}<title>{escape(meaning)}</title></path>")
    parts += [_drawn(line, x, y) for line in lines]
    named = [line for line in lines if line.label]
    legend = "".join(f'<span><i class="c{line.color}"></i>{escape(line.label)}</span>' for line in named)
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>{''.join(parts)}</svg>"
        + (f'<div class="legend">{legend}</div>' if legend else "")
        + "</figure>"
    )


def _range(low: float, high: float, margin: float) -> tuple[float, float]:
    width = high - low or abs(high) * 0.1 or 1.0
    return (low - margin * width, high + margin * width) if high > low else (low - width / 2, high + width / 2)


def _log_range(ys: np.ndarray) -> tuple[float, float]:
    low, high = _range(math.log10(ys.min()), math.log10(ys.max()), 0.04)
    return 10 ** max(low, -307.0), 10 ** min(high, 307.0)  # what a float holds


def _axes(x: Scale, y: Scale, x_label: str, y_format: Callable[[float], str]) -> list[str]:
    parts = []
    for tick in log_ticks(y.low, y.high) if y.log else ticks(y.low, y.high):
        at = float(y.at(np.array(tick)))
        parts.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(_text(LEFT - 6, at + 4, y_format(tick), "end"))
    for tick in ticks(x.low, x.high):
        at = float(x.at(np.array(tick)))
        parts.append(f'<path class="grid" d="M{at:.1f} {HEIGHT - BOTTOM}v4"/>')
        parts.append(_text(at, HEIGHT - BOTTOM + 17, short(tick), "middle"))
    return [*parts, _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x_label, "middle")]


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _drawn(line: Line, x: Scale, y: Scale) -> str:
    found = thin(line.curve)
    places = list(zip(x.at(found.x), y.at(found.y), strict=True))
    name = f"line c{line.color}" + " faint" * line.faint
    if line.points or len(places) == 1:
        dots = "".join(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5"/>' for a, b in places)
        joined = _path(places) if len(places) > 1 else ""
        return f'<g class="{name}"><path d="{joined}"/>{dots}</g>' if joined else f'<g class="{name}">{dots}</g>'
    return f'<g class="{name}"><path d="{_path(places)}"/></g>'


def _path(places: list[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in places)
