"""Lines of metrics.jsonl and events.jsonl, whose types are checked once, where they are read.

Anybody may have written a log folder. A key that no page computes with, or that a chart looks up number by number, is
not listed: `drawable` and `by_name` take any value.
"""

import json
import math
from typing import Annotated, Any, Required, TypedDict

import msgspec
from msgspec import Meta

from megazero.observe.progress_line import Record

MOST = 1e300  # of a number that is drawn: sums of many are finite
Whole = Annotated[int, Meta(ge=0, le=2**53)]
Amount = Annotated[float, Meta(ge=0, le=1e18)]  # bytes, tokens, seconds
Real = Annotated[float, Meta(ge=-MOST, le=MOST)]  # not NaN
Ranks = Annotated[int, Meta(ge=0, le=10**7)]
Scores = dict[str, Real | None]


class ShownText(TypedDict):
    prompt: str
    text: str


class Metrics(TypedDict, total=False):
    """An iteration, or an evaluation."""

    iteration: Required[Whole]
    at: Amount
    step_seconds: Amount | None
    consumed_tokens: Amount | None
    tokens_per_second: Amount | None
    memory_bytes: dict[str, Amount | None]
    traffic_bytes: dict[str, Amount | None]
    pause_seconds: dict[str, Amount]
    samples: list[ShownText]
    moe_choices: dict[str, Annotated[list[Amount], Meta(min_length=1)]]
    task_acc: Scores
    task_acc_norm: Scores
    task_perplexity: Scores
    task_bits_per_byte: Scores
    task_acc_stderr: dict[str, Real]
    task_acc_norm_stderr: dict[str, Real]
    task_items: dict[str, Whole]


class Event(TypedDict, total=False):
    """A start or an end. Those of older versions have fewer keys."""

    event: str
    iteration: Whole
    time: str
    at: Amount
    why: str
    stage: Whole
    command: list[str]
    given: list[str]
    config: dict[str, dict[str, Any] | str]
    layout: dict[str, Ranks | bool | list[Ranks]]
    environment: dict[str, Any]
    parameters: Whole
    active_parameters: Whole
    bytes_per_token: Annotated[float, Meta(gt=1e-9, le=1e9)]
    seconds: dict[str, Amount]
    lost_iterations: Whole
    lost_seconds: Amount
    down_seconds: Amount
    pause_seconds: dict[str, Amount]


def parse_record(line: bytes | str) -> Record:
    """Return the object of a line; an empty one for a torn line."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def checked(record: Record, kind: type, faults: list[str]) -> Record:
    """Return a record if its values have the types of `kind`; else an empty one, and append the reason to `faults`."""
    try:
        msgspec.convert(record, kind)
    except (msgspec.ValidationError, OverflowError) as error:
        faults.append(str(error)[:200])
        return {}
    return record


def drawable(value: Any) -> float:
    """Return a number that can be drawn; NaN for anything else."""
    return float(value) if isinstance(value, (int, float)) and abs(value) <= MOST else math.nan


def by_name(value: Any) -> dict[str, Any]:
    """Return a value that has names; an empty one for anything else."""
    return value if isinstance(value, dict) else {}
