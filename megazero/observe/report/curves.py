"""The curves of one or several runs, as the numbers that report.js draws."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from megazero.observe.progress_line import Record
from megazero.observe.report.runs import Array, Run, column, keys_of

POINTS, LEAST_POINTS = 2000, 400  # of a curve, which more than four runs share; at least
MAX_LINES = 8  # corpora of a chart: the colours of the style sheet
DIGITS = 6  # of a value; an axis has two more


class Line(NamedTuple):
    """A curve of a chart: its name in the legend ("" if the chart has no other) and its key in metrics.jsonl."""

    label: str
    key: str
    points: bool = False


class Chart(NamedTuple):
    """A chart.

    Attributes:
        lines: empty if `by` is given.
        by: a key with a value by name, such as corpora, each of which gets a line.
        log: logarithmic y, at first.
        zero: y begins at 0.
        loss: in nats per token; the page also shows it as perplexity or bits per byte.
        varying: left out while all values are equal.
        exact: not smoothed.
    """

    title: str
    lines: tuple[Line, ...] = ()
    by: str = ""
    log: bool = False
    zero: bool = False
    loss: bool = False
    varying: bool = False
    exact: bool = False


CHARTS = (
    Chart(
        "Loss",
        (
            Line("training", "loss"),
            Line("validation", "validation_loss", points=True),
            Line("validation, averaged weights", "validation_loss_ema", points=True),
        ),
        log=True,
        loss=True,
    ),
    Chart("Loss of modules that predict further ahead", by="mtp_losses", log=True, loss=True),
    Chart("Training loss by corpus", by="loss_by_corpus", log=True, loss=True),
    Chart("Validation loss by corpus", by="validation_loss_by_corpus", log=True, loss=True),
    Chart("Accuracy in tasks", by="task_acc", exact=True),
    Chart("Accuracy in tasks, options by their nats per byte", by="task_acc_norm", exact=True),
    Chart("Perplexity of continuations", by="task_perplexity", log=True, exact=True),
    Chart("Bits per byte of texts", by="task_bits_per_byte", exact=True),
    Chart("Gradient norm, before clipping", (Line("", "grad_norm"),), log=True),
    Chart("Update over weight, of the layer with the largest", (Line("", "layer_update_ratio"),), log=True, exact=True),
    Chart("Largest activation", (Line("", "layer_max_activation"),), log=True, exact=True),
    Chart("Largest attention logit", (Line("", "layer_max_logit"),), exact=True),
    Chart("Learning rate", (Line("", "lr"),), zero=True, exact=True),
    Chart("Throughput, tokens/s", (Line("", "tokens_per_second"),), zero=True),
    Chart("Peak memory of rank 0, bytes", (Line("", "memory_bytes/peak"),), zero=True, varying=True),
    Chart("Utilization of rank 0's GPU, percent", (Line("", "device/utilization"),), zero=True),
    Chart("Temperature of rank 0's GPU, degrees Celsius", (Line("", "device/temperature"),), exact=True),
    Chart("Load of the busiest expert; 1 is balanced", (Line("", "moe_load"),), zero=True),
    Chart("Entropy of routers, nats", (Line("", "moe_router_entropy"),)),
    Chart("Choices that experts drop, share", (Line("", "moe_dropped"),), zero=True, varying=True),
    Chart(
        "Balance losses of routers, without their factors",
        (Line("auxiliary loss", "moe_aux_loss"), Line("z-loss", "moe_z_loss")),
        zero=True,
    ),
    Chart("Loss scale", (Line("", "loss_scale"),), log=True, varying=True, exact=True),
)


def chart_data(runs: Sequence[Run], names: Sequence[str]) -> dict[str, Any]:
    """Return all charts, their axes and the starts after the first one, as values of JSON.

    A curve of more than `POINTS` values is thinned: the page gets the mean, the least and the greatest of every
    stretch, so that spikes remain.
    """
    thinned = [Thinned(run, max(LEAST_POINTS, POINTS * 4 // max(4, len(runs)))) for run in runs]
    charts = []
    for chart in CHARTS:
        series = [
            {"run": number, "label": line.label, "points": line.points, **found}
            for number, each in enumerate(thinned)
            for line in _lines(chart, each.run)
            if (found := each.series(line.key, chart.varying)) is not None
        ]
        if series:
            options = {name: getattr(chart, name) for name in ("title", "log", "zero", "loss", "exact")}
            charts.append(options | {"series": series})
    marks = [{"run": number, **mark} for number, run in enumerate(runs) for mark in _marks(run)]
    bytes_per_token = [run.start.get("bytes_per_token") for run in runs]
    grids = [each.grids for each in thinned]
    return {"runs": list(names), "bytes": bytes_per_token, "grids": grids, "marks": marks, "charts": charts}


class Thinned:
    """The curves of a run.

    Attributes:
        grids: places of points, by axis; `series` names them by their number.
    """

    def __init__(self, run: Run, points: int) -> None:
        self.run, self.points = run, points
        self.grids: list[dict[str, list[float | None]]] = []
        self._numbers: dict[bytes, int] = {}

    def series(self, key: str, varying: bool) -> dict[str, Any] | None:
        """Return a column's values and the number of its grid; None if it has none, or one value where all count."""
        values = column(self.run, key)
        known = np.flatnonzero(np.isfinite(values))
        if not len(known) or (varying and (values[known] == values[known[0]]).all()):
            return None
        if len(known) <= self.points:
            return {"grid": self._grid(known), "y": _numbers(values[known])}
        starts = np.arange(self.points) * len(values) // self.points
        finite = np.isfinite(values)
        counts = np.add.reduceat(finite, starts, dtype=np.int64)
        means = np.add.reduceat(np.where(finite, values, 0.0), starts) / np.where(counts, counts, np.nan)
        low, high = np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts)
        found = {"grid": self._grid(np.append(starts[1:], len(values)) - 1), "y": _numbers(means)}
        spread = np.nanmax(high - low) > 1e-3 * np.nanmax(np.abs(means))
        return found | ({"low": _numbers(low), "high": _numbers(high)} if spread else {})

    def _grid(self, places: np.ndarray) -> int:
        number = self._numbers.setdefault(places.tobytes(), len(self.grids))
        if number == len(self.grids):
            self.grids.append({axis: _numbers(found[places], DIGITS + 2) for axis, found in self.run.axes.items()})
        return number


def _lines(chart: Chart, run: Run) -> Iterator[Line]:
    yield from chart.lines
    names = keys_of(run, chart.by)[:MAX_LINES] if chart.by else []
    for name, label in zip(names, short_names(names), strict=True):
        yield Line(label, f"{chart.by}/{name}", points=chart.by.startswith(("validation", "task")))


def short_names(names: Sequence[str]) -> list[str]:
    """Return paths without the folders that all have in common."""
    parts = [name.split("/") for name in names]
    folders = zip(*(part[:-1] for part in parts), strict=False)
    common = sum(1 for _ in itertools.takewhile(lambda level: len(set(level)) == 1, folders))
    return ["/".join(part[common:]) for part in parts]


def _marks(run: Run) -> Iterator[dict[str, Any]]:
    """Yield the place of every start but the first, on each axis."""
    axes = run.axes
    for start in run.starts:
        if start.get("iteration"):
            places = {
                axis: float(np.interp(start["iteration"], axes["iteration"], found)) for axis, found in axes.items()
            }
            yield {"at": places, "text": start_text(start)}


def start_text(start: Record) -> str:
    """Describe a start that is not the first."""
    words = f"stage {start['stage']} began" if "stage" in start else "resumed"
    return f"{words} after iteration {start['iteration']:,}"


def _numbers(values: Array, digits: int = DIGITS) -> list[float | None]:
    """Return short numbers for JSON, and None for NaN."""
    rounded = (float(f"{value:.{digits}g}") for value in values.tolist())
    return [None if value != value else int(value) if value.is_integer() else value for value in rounded]
