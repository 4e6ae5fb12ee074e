"""Read the metrics and events of a run's log folder, and its curves as arrays."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from megazero.log import log
from megazero.observe.progress_line import Record
from megazero.observe.report.records import Event, Metrics, by_name, checked, drawable, parse_record
from megazero.units import things

Array = np.ndarray[Any, np.dtype[np.float64]]
XAxis = Literal["iteration", "tokens", "hours"]

METRICS, EVENTS = "metrics.jsonl", "events.jsonl"
DONE = "done"  # why a run ended with its last iteration
MAX_BYTES = 128 << 20  # of metrics.jsonl; of a longer file, every n-th iteration is read
# keys of iterations that are read in any case
ALWAYS_READ = (
    b'"validation_loss"',
    b'"task_acc"',
    b'"task_bits_per_byte"',
    b'"samples"',
    b'"pause_seconds"',
    b'"moe_choices"',
)
SHARED = "memory_bytes", "traffic_bytes"  # keys whose values are mostly those of the record before: kept once
POINTS = 600  # of a drawn curve: about one per pixel


@dataclass(frozen=True)
class Run:
    """The contents of a log folder.

    Attributes:
        records: iterations, in order. If the file exceeds `MAX_BYTES`: every `stride`-th iteration, and those with a
            key of `ALWAYS_READ`.
        events: starts and ends of the run, in order; empty for folders of older versions.
    """

    name: str
    records: tuple[Record, ...]
    events: tuple[Record, ...] = ()
    stride: int = 1
    faults: tuple[str, ...] = ()  # why lines were left out

    @property
    def starts(self) -> list[Record]:
        return [event for event in self.events if event.get("event") == "start"]

    @property
    def start(self) -> Record:
        """The event of the last start; empty if there is none."""
        return (self.starts or [{}])[-1]

    @property
    def ended(self) -> bool:
        """The run has recorded its end."""
        return bool(self.events) and self.events[-1].get("event") == "end"

    @property
    def done(self) -> bool:
        """It has ended with its last iteration. Others may be resumed."""
        return self.ended and self.events[-1].get("why") == DONE

    @functools.cached_property
    def axes(self) -> dict[XAxis, Array]:
        """The place of every record in iterations, in tokens, and in hours of training steps."""
        iterations = np.array([record["iteration"] for record in self.records], dtype=np.float64)
        # above 1 where records were left out
        between = np.diff(iterations, prepend=max(0.0, iterations[0] - self.stride))
        seconds = np.array([record.get("step_seconds") or 0.0 for record in self.records], dtype=np.float64)
        tokens = np.array([record.get("consumed_tokens", np.nan) for record in self.records], dtype=np.float64)
        if np.isnan(tokens).any():  # an older version's
            rates = np.array([record.get("tokens_per_second") or 0.0 for record in self.records])
            tokens = np.cumsum(np.round(seconds * rates) * between)
        return {"iteration": iterations, "tokens": tokens, "hours": np.cumsum(seconds * between) / 3600}


class Curve(NamedTuple):
    """Values over an axis: x and y of one length, finite."""

    x: Array
    y: Array


def read_run(folder: Path) -> Run:
    """Read a --log-dir folder. Lines that are not whole iterations, such as one cut off by a crash, are skipped.

    Raises:
        ValueError: it has no iteration.
    """
    metrics = folder / METRICS
    if not metrics.is_file():
        raise ValueError(f"{metrics} does not exist; give the --log-dir folder of a run")
    stride = -(-metrics.stat().st_size // MAX_BYTES) or 1
    found, before, evaluated, faults = dict[int, Record](), Record(), False, list[str]()
    with metrics.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number % stride == 0 or any(key in line for key in ALWAYS_READ):
                record = parse_record(line)
                if record:
                    record = checked(record, Metrics, faults)
                if not record:
                    continue
                if "loss" not in record:  # --eval-only wrote it
                    evaluated = True
                else:
                    found[record["iteration"]] = record
                    record |= {key: before[key] for key in SHARED if key in before and record.get(key) == before[key]}
                    before = record
    if not found and evaluated:
        raise ValueError(
            f"{metrics} has evaluations alone (--eval-only), each a line of numbers, and a report shows iterations; "
            "name the --log-dir of a run that trains"
        )
    if not found:
        damaged = f", but {line_faults(faults)}" if faults else " yet"
        raise ValueError(f"{metrics} has no iteration{damaged}; name the --log-dir of a run that trains")
    events = tuple(read_events(folder, faults))
    if faults:
        log.warning(f"{folder}: {line_faults(faults)}")
    return Run(
        name=folder.resolve().name,
        records=tuple(found[i] for i in sorted(found)),
        events=events,
        stride=stride,
        faults=tuple(faults),
    )


def line_faults(faults: Sequence[str]) -> str:
    """Describe the lines of a log folder that were left out."""
    return f"{things(len(faults), 'line')} that no run wrote, which were left out, such as: {faults[0]}"


def read_events(folder: Path, faults: list[str] | None = None) -> list[Record]:
    """Read the whole lines of events.jsonl; none if it is missing. faults: as of `checked`."""
    path, faults = folder / EVENTS, [] if faults is None else faults
    events = filter(None, map(parse_record, path.read_bytes().splitlines())) if path.is_file() else ()
    return [event for event in (checked(each, Event, faults) for each in events) if event]


# -- curves


def column(run: Run, key: str) -> Array:
    """Return `key`, such as "loss" or "memory_bytes/peak", of every record; of values by name, such as the loads of
    layers, the largest. NaN where it is missing or not finite."""
    outer, _, inner = key.partition("/")
    found = np.full(len(run.records), np.nan)
    for place, record in enumerate(run.records):
        value = record.get(outer)
        if isinstance(value, dict):
            if not inner:
                value = max((n for n in map(drawable, value.values()) if not math.isnan(n)), default=None)
            else:
                value = value.get(inner)
        found[place] = drawable(value)
    return found


def curve(run: Run, key: str, axis: XAxis = "iteration") -> Curve:
    """Return the finite values of a column."""
    values = column(run, key)
    known = np.isfinite(values)
    return Curve(run.axes[axis][known], values[known])


def keys_of(run: Run, key: str) -> list[str]:
    """Return the names under a nested `key`, in the order of their first appearance."""
    return list(dict.fromkeys(name for record in run.records for name in by_name(record.get(key))))


def smooth(found: Curve, window: int) -> Curve:
    """Return the mean of the last `window` values at each place, or of fewer at the start.

    Args:
        window: 0 chooses a hundredth of the curve; 1 changes nothing.
    """
    n = len(found.y)
    window = min(window or max(1, n // 100), max(1, n))
    sums = np.cumsum(np.insert(found.y, 0, 0.0))
    first = np.maximum(np.arange(1, n + 1) - window, 0)
    return Curve(found.x, (sums[1:] - sums[first]) / (np.arange(1, n + 1) - first))


def thin(found: Curve, points: int = POINTS) -> Curve:
    """Return at most about `points` of a curve: the lowest and the highest value of every stretch, so spikes remain."""
    n = len(found.x)
    if n <= points:
        return found
    kept = [np.array([0, n - 1])]
    for part in np.array_split(np.arange(n), points // 2):
        kept.append(part[[found.y[part].argmin(), found.y[part].argmax()]])
    at = np.unique(np.concatenate(kept))
    return Curve(found.x[at], found.y[at])


def short(value: float) -> str:
    """Format a tick of an axis: "0.5", "20 k", "1.5 M", "3 G"."""
    for scale, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:g} {letter}"
    return f"{value:.6g}"
