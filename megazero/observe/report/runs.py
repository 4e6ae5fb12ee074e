"""A run's log folder as numbers: metrics.jsonl, events.jsonl and config.toml."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

Record = dict[str, Any]  # one iteration, as in metrics.jsonl
Array = np.ndarray[Any, np.dtype[np.float64]]
XAxis = Literal["iteration", "tokens", "hours"]

METRICS, EVENTS = "metrics.jsonl", "events.jsonl"
MAX_BYTES = 64 << 20  # of metrics.jsonl; of a longer file, every n-th iteration is read
ALIKE = 1e-4  # relative: curves of runs that differ by less are said to be the same to so much
POINTS = 600  # of a drawn curve: about a pixel each


@dataclass(frozen=True)
class Run:
    """A log folder.

    Attributes:
        records: iterations, in order; of a file above `MAX_BYTES` every `stride`-th, and those with a validation or
            samples.
        events: starts and ends of the run, in order; empty for folders of older versions.
        options: flag -> value of config.toml.
        cut: numbers of lines that are no whole iteration.
    """

    name: str
    records: tuple[Record, ...]
    events: tuple[Record, ...] = ()
    options: dict[str, Any] | None = None
    cut: tuple[int, ...] = ()
    stride: int = 1

    @property
    def start(self) -> Record:
        """The event of the last start; empty if there is none."""
        return next((event for event in reversed(self.events) if event.get("event") == "start"), {})


class Curve(NamedTuple):
    """Values over an axis: x and y of one length, finite."""

    x: Array
    y: Array


def read_run(path: Path) -> Run:
    """Read a --log-dir folder, or a metrics.jsonl alone.

    Raises:
        ValueError: it has no iteration.
    """
    folder, metrics = (path, path / METRICS) if path.is_dir() else (path.parent, path)
    if not metrics.is_file():
        raise ValueError(f"{metrics} does not exist; give the --log-dir folder of a run")
    stride = -(-metrics.stat().st_size // MAX_BYTES) or 1
    found: dict[int, Record] = {}
    cut: list[int] = []
    with metrics.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number % stride and b'"validation_loss"' not in line and b'"samples"' not in line:
                continue
            record = _parse(line)
            if record is not None and _is_iteration(record):
                found[record["iteration"]] = record
            elif record is None or "eval_split" not in record:  # else of a checkpoint, by --eval-only
                cut.append(number)
    if not found:
        raise ValueError(f"{metrics} has no iteration yet")
    records = tuple(found[i] for i in sorted(found))
    return Run(folder.resolve().name, records, _read_events(folder), _read_options(folder), tuple(cut), stride)


def _parse(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _is_iteration(record: Record) -> bool:
    return type(record.get("iteration")) is int and "loss" in record


def _read_events(folder: Path) -> tuple[Record, ...]:
    try:
        lines = (folder / EVENTS).read_bytes().splitlines()
    except OSError:
        return ()
    return tuple(event for event in map(_parse, lines) if event is not None)


def _read_options(folder: Path) -> dict[str, Any]:
    try:
        return tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


# -- curves


def curve(run: Run, key: str, axis: XAxis = "iteration") -> Curve:
    """Return the values of `key`, such as "loss" or "memory_bytes/peak", where it is there and finite."""
    x, at = axis_values(run, axis), key.split("/", 1)
    points = []
    for place, record in zip(x, run.records, strict=True):
        value = record.get(at[0])
        if len(at) > 1 and isinstance(value, dict):
            value = value.get(at[1])
        if isinstance(value, (int, float)) and math.isfinite(value):
            points.append((place, float(value)))
    return Curve(*np.array(points, dtype=np.float64).reshape(-1, 2).T)


def axis_values(run: Run, axis: XAxis) -> Array:
    """Return the place of every record on an axis: iterations, tokens, or hours of training steps."""
    iterations = np.array([record["iteration"] for record in run.records], dtype=np.float64)
    if axis == "iteration":
        return iterations
    seconds = np.array([_number(record, "step_seconds") for record in run.records])
    between = np.diff(iterations, prepend=max(0.0, iterations[0] - run.stride))  # above 1 where records were left out
    if axis == "hours":
        return np.cumsum(seconds * between) / 3600
    rates = np.array([_number(record, "tokens_per_second") for record in run.records])
    return np.cumsum(np.round(seconds * rates) * between)


def _number(record: Record, key: str) -> float:
    value = record.get(key)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else 0.0


def keys_of(run: Run, key: str) -> list[str]:
    """Return the names under a nested `key`, in the order in which they come first."""
    found: dict[str, None] = {}
    for record in run.records:
        found |= dict.fromkeys(record.get(key) or {})
    return list(found)


def smooth(found: Curve, window: int) -> Curve:
    """Return at each place the mean of the last `window` values; of the first ones, of those that there are.

    Args:
        window: 0 chooses a hundredth of the curve; 1 changes nothing.
    """
    n = len(found.y)
    window = min(window or max(1, n // 100), max(1, n))
    sums = np.cumsum(np.insert(found.y, 0, 0.0))
    first = np.maximum(np.arange(1, n + 1) - window, 0)
    return Curve(found.x, (sums[1:] - sums[first]) / (np.arange(1, n + 1) - first))


def thin(found: Curve, points: int = POINTS) -> Curve:
    """Return at most about `points` of a curve: of every stretch the lowest and the highest value, so spikes stay."""
    n = len(found.x)
    if n <= points:
        return found
    kept = [np.array([0, n - 1])]
    for part in np.array_split(np.arange(n), points // 2):
        kept.append(part[[found.y[part].argmin(), found.y[part].argmax()]])
    at = np.unique(np.concatenate(kept))
    return Curve(found.x[at], found.y[at])


# -- runs beside each other


class Twin(NamedTuple):
    """An earlier run with the same curve."""

    of: int  # its number
    difference: float  # the largest relative one; 0: identical

    def label(self, names: Sequence[str]) -> str:
        other = names[self.of]
        return f"identical to {other}" if self.difference == 0 else f"as {other}, to {self.difference:.0e}"


def twins(curves: Sequence[Curve]) -> list[Twin | None]:
    """Find for each curve over iterations the first before it that has the same values where both have one."""
    found: list[Twin | None] = []
    for number, here in enumerate(curves):
        near = (Twin(other, relative_difference(curves[other], here)) for other in range(number))
        found.append(next((twin for twin in near if twin.difference < ALIKE), None))
    return found


def relative_difference(a: Curve, b: Curve) -> float:
    """Return the largest relative difference of two curves at the places of both; infinity if they share none."""
    _, at_a, at_b = np.intersect1d(a.x, b.x, return_indices=True)
    if not len(at_a):
        return float("inf")
    ours, theirs = a.y[at_a], b.y[at_b]
    scale = np.maximum(np.abs(ours), np.abs(theirs))
    return float((np.abs(ours - theirs) / np.where(scale > 0, scale, 1.0)).max())


def dashes(found: Sequence[Twin | None]) -> list[tuple[int, int]]:
    """Return (phase, number) of each curve within its group of equal ones: as dashes in turn, each of them is seen."""
    groups = [number if twin is None else twin.of for number, twin in enumerate(found)]
    return [(groups[:number].count(group), groups.count(group)) for number, group in enumerate(groups)]


AXIS_LABELS: dict[XAxis, str] = {"iteration": "iteration", "tokens": "tokens", "hours": "hours of training steps"}


def short(value: float) -> str:
    """Format a tick of an axis: "0.5", "20 k", "1.5 M", "3 G"."""
    for scale, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:g} {letter}"
    return f"{value:.6g}"
