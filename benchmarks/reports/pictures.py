"""Pictures of reports, as SVG files that are the same whenever the numbers are."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
COLORS = ("#9aa5b1", "#2f6f9f", "#e0923b", "#5a9a5a", "#a05a9a", "#c4483c", "#7a6a4f")


def bars(name: str, groups: Sequence[str], series: Mapping[str, Sequence[float]], label: str) -> None:
    """Draw a bar for each group and series, with its value above it."""
    figure, axes = _axes()
    width = 0.8 / len(series)
    for at, (title, values) in enumerate(series.items()):
        places = [group + (at - (len(series) - 1) / 2) * width for group in range(len(groups))]
        drawn = axes.bar(places, values, width * 0.92, label=title, color=COLORS[at])
        axes.bar_label(drawn, fmt=lambda value: f"{value:.3g}", fontsize=8)
    _finish(name, figure, axes, groups, label)


def stacks(name: str, groups: Sequence[str], parts: Mapping[str, Sequence[float]], label: str, limit: float) -> None:
    """Draw a stack of parts for each group, and a line at `limit`."""
    figure, axes = _axes()
    below = [0.0] * len(groups)
    for at, (title, values) in enumerate(parts.items()):
        axes.bar(range(len(groups)), values, 0.6, bottom=below, label=title, color=COLORS[at])
        below = [a + b for a, b in zip(below, values, strict=True)]
    axes.axhline(limit, color="black", linewidth=0.8, linestyle="--")
    for group, total in enumerate(below):
        axes.annotate(f"{total:.1f}", (group, total), ha="center", va="bottom", fontsize=8)
    _finish(name, figure, axes, groups, label)


def lines(
    name: str, series: Mapping[str, tuple[Sequence[float], Sequence[float]]], x_label: str, label: str, log_x: bool
) -> None:
    """Draw a line through (xs, ys) for each series."""
    figure, axes = _axes()
    for at, (title, (xs, ys)) in enumerate(series.items()):
        axes.plot(xs, ys, label=title, color=COLORS[1 + at % (len(COLORS) - 1)], linewidth=1.5)
    if log_x:
        axes.set_xscale("log")
    axes.set_xlabel(x_label)
    _finish(name, figure, axes, None, label)


def _axes() -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "megazero"  # else ids are drawn at random
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=(7.2, 3.6), layout="constrained")


def _finish(name: str, figure: Any, axes: Any, groups: Sequence[str] | None, label: str) -> None:
    import matplotlib.pyplot as plt

    if groups is not None:
        axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel(label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    PICTURES.mkdir(exist_ok=True)
    figure.savefig(PICTURES / name, metadata={"Date": None})
    plt.close(figure)
