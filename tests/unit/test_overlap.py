"""benchmarks.overlap: what a trace says of communication that computation waits for."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.overlap import Waiting, table, waiting


def trace(device: bool) -> dict[str, Any]:
    """Two iterations of 10 ms of one rank; on a GPU operations are issued at once, and run later."""
    spans = [("Forward head mb 0", 4.0), ("start Reduce head", 0.5), ("Backward blocks.0 mb 0", 3.0)]
    spans += [("wait Reduce head", 1.5), ("SumTied token_embedding", 0.25), ("Norm", 0.25)]
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


@pytest.mark.parametrize("device", [False, True])
def test_waits_and_what_is_not_split_are_exposed(device: bool) -> None:
    """A GPU's are on the device's track; what is in flight is not waited for."""
    assert waiting(trace(device)) == Waiting(10.0, {"dp": 1.5, "pp": 0.25})


def test_what_overlap_hides_is_what_is_not_waited_for_any_more() -> None:
    found = table(Waiting(10.0, {"dp": 1.5}), Waiting(14.0, {"dp": 6.0}))
    assert "| dp | 1.50 | 15.0% | 6.00 | 75% |" in found
    assert "10.00 ms with overlap, 14.00 without" in found
    assert "| dp | 1.50 | 15.0% |  |  |" in table(Waiting(10.0, {"dp": 1.5}), None)


def test_another_file_is_refused() -> None:
    with pytest.raises(ValueError, match="--profile-iterations"):
        waiting({"traceEvents": []})
