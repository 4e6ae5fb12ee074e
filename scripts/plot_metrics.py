#!/usr/bin/env python3
"""Compare runs: loss, throughput and memory, from their metrics.jsonl.

Runs with the same loss curve are drawn in alternating dashes, so that each is visible; the legend names them. Examples:

    python scripts/plot_metrics.py runs/a runs/b --output loss.png
    python scripts/plot_metrics.py runs/a runs/b --x tokens --smooth 50 --output loss.svg
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megazero.observe.report.comparison import run_names
from megazero.observe.report.page import MEMORY
from megazero.observe.report.runs import Curve, Run, XAxis, curve, read_run, short, smooth, thin
from megazero.optional import missing_package

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DASH = 5  # line widths of one dash
LOG_ABOVE = 3  # the loss axis is logarithmic if the loss falls by more than this factor
ALIKE = 1e-4  # relative: the legend reports curves that differ by less as equal
AXIS_LABELS: dict[XAxis, str] = {"iteration": "iteration", "tokens": "tokens", "hours": "hours of training steps"}


@dataclass(frozen=True)
class Options:
    """Compare runs: loss, throughput and memory, from their metrics.jsonl."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """The --log-dir folders."""
    output: Path = Path("loss.png")
    """File to write: .png, .svg or .pdf."""
    x: XAxis = "iteration"
    """Unit of the horizontal axis."""
    smooth: int = 0
    """Iterations of the running mean, drawn over the faint values. 0: a hundredth of the run; 1: the values alone."""


def plot(runs: Sequence[Run], output: Path, x: XAxis = "iteration", window: int = 0) -> None:
    """Draw loss, throughput and memory of runs into a file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib import ticker

    names = run_names(runs)
    figure = plt.figure(figsize=(12, 6), layout="constrained")
    panels: Any = figure.subplot_mosaic([["loss", "speed"], ["loss", "memory"]], width_ratios=[3, 2])
    draw_losses(panels["loss"], runs, names, x=x, window=window)
    draw_throughput(panels["speed"], runs, x, window)
    draw_memory(panels["memory"], runs, names)
    for panel in ("loss", "speed"):
        panels[panel].set_xlabel(AXIS_LABELS[x])
        panels[panel].xaxis.set_major_formatter(lambda value, _: short(value))
        panels[panel].xaxis.set_major_locator(ticker.MaxNLocator(6))
        panels[panel].grid(alpha=0.3)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=120)
    plt.close(figure)


def draw_losses(axes: Axes, runs: Sequence[Run], names: list[str], x: XAxis, window: int) -> None:
    """Draw the training loss as a line and the validation loss as points, a colour per run."""
    from matplotlib import ticker

    same = twins([curve(run, "loss") for run in runs])
    for number, (run, name, twin, (phase, shared)) in enumerate(zip(runs, names, same, dashes(same), strict=True)):
        found, color = curve(run, "loss", x), f"C{number}"
        smoothed = smooth(found, window)
        style: Any = "-" if shared == 1 else (DASH * phase, (DASH, DASH * (shared - 1)))
        label = f"{name}: {smoothed.y[-1]:.4f} at the end" if len(found.y) else f"{name}: no finite loss"
        if twin is not None:
            label += f", {twin.label(names)}"
        if len(found.y) and (smoothed.y != found.y).any():
            axes.plot(*thin(found, 4000), color=color, alpha=0.2, linewidth=0.8)
        axes.plot(*thin(smoothed, 4000), color=color, linestyle=style, linewidth=2 if shared > 1 else 1.5)
        axes.plot([], color=color, label=label)  # solid in the legend, because a dashed line may begin with a gap
        judged = curve(run, "validation_loss", x)
        if len(judged.y):
            label = f"{name}: validation, {judged.y[-1]:.4f} at the end"
            axes.plot(*judged, color=color, marker="o", markersize=4, linestyle=":", label=label)
    low, high = axes.dataLim.intervaly
    if 0 < LOG_ABOVE * low < high:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 6, 8)))
        axes.yaxis.set_major_formatter(lambda value, _: short(value))
        axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.set(ylabel="cross-entropy, nats per token")
    axes.legend(fontsize="small")


def draw_throughput(axes: Axes, runs: Sequence[Run], x: XAxis, window: int) -> None:
    for number, run in enumerate(runs):
        axes.plot(*thin(smooth(curve(run, "tokens_per_second", x), window), 4000), color=f"C{number}")
    axes.set(ylabel="tokens/s", ylim=(0, None))
    axes.yaxis.set_major_formatter(lambda value, _: short(value))


def draw_memory(axes: Axes, runs: Sequence[Run], names: list[str]) -> None:
    """Draw a bar per run: the peak of each kind of memory, end to end, and a line at the peak of their total."""
    from matplotlib import colormaps

    kinds = [kind for kind in MEMORY if kind not in ("peak", "host")]
    left = [0.0] * len(runs)
    for number, kind in enumerate(kinds):
        sizes = [max(curve(run, f"memory_bytes/{kind}").y, default=0.0) for run in runs]
        if any(sizes):
            axes.barh(names, sizes, left=left, label=MEMORY[kind], color=colormaps["Set2"](number), height=0.6)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for number, run in enumerate(runs):
        peak = max(curve(run, "memory_bytes/peak").y, default=0.0)
        axes.plot([peak] * 2, [number - 0.4, number + 0.4], color="black", label="" if number else MEMORY["peak"])
    axes.set(xlabel="bytes on rank 0, the most of each kind")
    axes.xaxis.set_major_formatter(lambda value, _: short(value))
    axes.invert_yaxis()
    axes.legend(fontsize="x-small", ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.2))


class Twin(NamedTuple):
    """An earlier run with an equal curve."""

    of: int  # its number
    difference: float  # largest relative difference; 0: identical

    def label(self, names: Sequence[str]) -> str:
        other = names[self.of]
        return f"identical to {other}" if self.difference == 0 else f"as {other}, to {self.difference:.0e}"


def twins(curves: Sequence[Curve]) -> list[Twin | None]:
    """Find for each curve the first one before it that is equal at their common iterations."""
    found: list[Twin | None] = []
    for number, here in enumerate(curves):
        near = (Twin(other, relative_difference(curves[other], here)) for other in range(number))
        found.append(next((twin for twin in near if twin.difference < ALIKE), None))
    return found


def relative_difference(a: Curve, b: Curve) -> float:
    """Return the largest relative difference at common places; infinity if there are none."""
    _, at_a, at_b = np.intersect1d(a.x, b.x, return_indices=True)
    if not len(at_a):
        return float("inf")
    ours, theirs = a.y[at_a], b.y[at_b]
    scale = np.maximum(np.abs(ours), np.abs(theirs))
    return float((np.abs(ours - theirs) / np.where(scale > 0, scale, 1.0)).max())


def dashes(found: Sequence[Twin | None]) -> list[tuple[int, int]]:
    """Return each curve's number in its group of equal ones, and their count, for dashes that alternate."""
    groups = [number if twin is None else twin.of for number, twin in enumerate(found)]
    return [(groups[:number].count(group), groups.count(group)) for number, group in enumerate(groups)]


def main(options: Options) -> None:
    if not options.runs:
        raise ValueError("no run is named; give the --log-dir folder of one or more")
    if options.smooth < 0:
        raise ValueError(f"--smooth {options.smooth}: must be a number of iterations; 0 chooses one, 1 smooths nothing")
    runs = [read_run(path) for path in options.runs]
    try:
        plot(runs, options.output, options.x, options.smooth)
    except (OSError, ValueError) as error:
        raise ValueError(f"--output {options.output}: {error}") from None
    print(f"wrote {options.output}")


if __name__ == "__main__":
    try:
        main(tyro.cli(Options))
    except ModuleNotFoundError as error:
        sys.exit(f"this {missing_package(error)}")
    except ValueError as error:
        sys.exit(f"error: {error}")
