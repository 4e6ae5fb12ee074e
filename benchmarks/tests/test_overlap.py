"""benchmarks.overlap and benchmarks.step_trace: waits for communication, and the end of a step, in traces."""

from typing import Any

import pytest

from benchmarks.overlap import Waiting, table, waiting
from benchmarks.step_trace import comparison, covered, tail_of
from megazero.engine.plan.program.operations import (
    Backward,
    BackwardWeights,
    Forward,
    GradNorm,
    Reduce,
    Start,
    Update,
    Wait,
)
from megazero.observe.timeline import Interval
from tests.helpers.table import for_each

pytestmark = pytest.mark.second


def trace(device: bool) -> dict[str, Any]:
    """Two iterations of 10 ms of one rank; on a GPU operations are issued at once, and run later."""
    spans = [("Forward head mb 0", 4.0), ("start Reduce head", 0.5), ("Backward blocks.0 mb 0", 3.0)]
    spans += [("wait Reduce head", 1.5), ("SumTied token_embedding", 0.25), ("GradNorm", 0.25)]
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": name}}
        for tid, name in ((0, "compute"), (1, "device"), (2, "dp"))
        if device or tid != 1
    ]
    for number in (1, 2):
        at = number * 10_000.0
        events.append({"ph": "X", "pid": 0, "tid": 0, "name": f"iteration {number}", "ts": at, "dur": 10_000.0})
        events.append({"ph": "X", "pid": 0, "tid": 2, "name": "Reduce head", "ts": at, "dur": 5_000.0})
        for name, ms in spans:
            events.append({"ph": "X", "pid": 0, "tid": int(device), "name": name, "ts": at, "dur": ms * 1000})
            if device:
                events.append({"ph": "X", "pid": 0, "tid": 0, "name": name, "ts": at, "dur": 1.0})
    return {"traceEvents": events}


@for_each("device", [False, True])
def test_waits_and_what_is_not_split_are_exposed(device: bool) -> None:
    """A GPU's are on the device's track; operations in flight are not waited for."""
    assert waiting(trace(device)) == Waiting(10.0, {"dp": 1.5, "pp": 0.25})


def test_what_overlap_hides_is_what_is_not_waited_for_any_more() -> None:
    found = table(Waiting(10.0, {"dp": 1.5}), Waiting(14.0, {"dp": 6.0}))
    assert "| dp | 1.50 | 15.0% | 6.00 | 75% |" in found
    assert "10.00 ms with overlap, 14.00 without" in found
    assert "| dp | 1.50 | 15.0% |  |  |" in table(Waiting(10.0, {"dp": 1.5}), None)


def test_another_file_is_refused() -> None:
    with pytest.raises(ValueError, match="--profile-iterations"):
        waiting({"traceEvents": []})


def test_the_end_of_a_step() -> None:
    """It begins when the last backward ends; a wait that began before counts from there."""
    spans = [
        Interval(Forward("head", 0, True), 0, 5_000_000),
        Interval(Backward("head", 0), 5_000_000, 10_000_000),
        Interval(Wait(Reduce("head")), 11_000_000, 14_000_000),
        Interval(Start(Reduce("blocks.0")), 12_000_000, 12_500_000),
        Interval(BackwardWeights("blocks.0", 0), 10_000_000, 13_000_000),
        Interval(GradNorm(), 14_000_000, 16_000_000),
        Interval(Update("head"), 16_000_000, 17_000_000),
        Interval(Update("blocks.0"), 17_500_000, 20_000_000),
    ]
    seconds, parts = tail_of(spans)
    assert seconds == pytest.approx(7e-3)
    assert parts == pytest.approx({"Reduce": 1e-3, "GradNorm": 2e-3, "Update": 3.5e-3})


def test_time_in_which_any_kernel_runs() -> None:
    assert covered([(4.0, 5.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.5)]) == 4.0
    assert covered([]) == 0.0


@for_each(("seconds", "words"), [(0.97, "flat, the host"), (0.85, "not flat"), (0.5, "not flat")])
def test_a_step_is_flat_where_its_tokens_do_not_matter(seconds: float, words: str) -> None:
    text = comparison((4, seconds), (8, 1.0))
    assert f"takes {seconds:.2f} of the time of 8 for 0.50 of its tokens: {words}" in text
