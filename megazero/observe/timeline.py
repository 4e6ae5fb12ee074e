"""`Timeline`: when this rank carried out each operation of a step. It observes the interpreter."""

from __future__ import annotations

import contextlib
import time
from types import TracebackType
from typing import NamedTuple

import torch

from megazero.plan.program.operations import Op, name_of


class Span(NamedTuple):
    """An operation's begin and end, in nanoseconds since some instant that all spans of a timeline share."""

    op: Op
    begin: int
    end: int


class Timeline:
    """The operations of one iteration in order; an `Observer` of the interpreter, and the context of each operation.

    Attributes:
        begin, end: of the iteration, by time.perf_counter_ns.
        issued: when each operation was issued; on a CPU that is when it ran. Filled by `close`.
    """

    on_gpu = False

    def __init__(self) -> None:
        self._spans: list[tuple[Op, int, int]] = []
        self._clock = time.perf_counter_ns
        self.issued: list[Span] = []
        self.begin = self.end = self._clock()

    def __call__(self, op: Op) -> Timeline:
        self._op = op
        return self

    def __enter__(self) -> None:
        self._begin = self._clock()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._spans.append((self._op, self._begin, self._clock()))

    def close(self) -> None:
        """End the iteration."""
        self.end = self._clock()
        self.issued = [Span(*span) for span in self._spans]

    def computed(self) -> list[Span]:
        """Return the times at which the device ran each operation; call it after `close`."""
        return self.issued


class GpuTimeline(Timeline):
    """Adds when the compute stream ran each operation, by pairs of CUDA events: it is issued long before that."""

    on_gpu = True

    def __init__(self, device: torch.device, ranges: bool) -> None:
        """`ranges`: make each operation a range of torch.profiler too."""
        self._device, self._ranges = device, ranges
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        torch.cuda.synchronize(device)
        self._origin = self._event()
        super().__init__()

    def __enter__(self) -> None:
        self._range = torch.profiler.record_function(name_of(self._op)) if self._ranges else contextlib.nullcontext()
        self._range.__enter__()
        self._started = self._event()
        super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        super().__exit__(kind, error, at)
        self._events.append((self._started, self._event()))
        self._range.__exit__(kind, error, at)

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        super().close()

    def computed(self) -> list[Span]:
        at = [[self.begin + round(1e6 * self._origin.elapsed_time(e)) for e in pair] for pair in self._events]
        return [Span(span.op, *pair) for span, pair in zip(self.issued, at, strict=True)]

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def timeline(device: torch.device, ranges: bool) -> Timeline:
    """Make the timeline for a device."""
    return GpuTimeline(device, ranges) if device.type == "cuda" else Timeline()
