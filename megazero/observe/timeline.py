"""`Timeline`: when this rank carried out each operation of an iteration."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from megazero.engine.plan.program.operations import Op, name_of


class Interval(NamedTuple):
    """The begin and the end of an operation, in nanoseconds of time.perf_counter_ns."""

    op: Op
    begin: int
    end: int


class Timeline:
    """An `Observer` of the interpreter that records one iteration.

    Attributes:
        begin, end: of the iteration.
        issued: when the host issued each operation, in order. On a CPU it ran then.
    """

    def __init__(self, device: torch.device, ranges: bool = False) -> None:
        """Begin the iteration.

        Args:
            ranges: on a GPU, make each operation a range of torch.profiler too.
        """
        self.on_gpu = device.type == "cuda"
        self._device, self._ranges = device, ranges and self.on_gpu
        self._events: list[tuple[Any, Any]] = []  # per operation, on the compute stream
        if self.on_gpu:
            torch.cuda.synchronize(device)
        self._origin = self._event()
        self.begin = self.end = time.perf_counter_ns()
        self.issued: list[Interval] = []

    @contextlib.contextmanager
    def __call__(self, op: Op) -> Iterator[None]:
        with torch.profiler.record_function(name_of(op)) if self._ranges else contextlib.nullcontext():
            computes, begin = self._event(), time.perf_counter_ns()
            yield
            self.issued.append(Interval(op, begin, time.perf_counter_ns()))
            self._events.append((computes, self._event()))

    def close(self) -> None:
        """End the iteration."""
        if self.on_gpu:
            torch.cuda.synchronize(self._device)
        self.end = time.perf_counter_ns()

    def computed(self) -> list[Interval]:
        """Return when the device ran each operation, which may be long after its issue; call it after `close`."""
        if not self.on_gpu:
            return self.issued
        at = [[self.begin + round(1e6 * self._origin.elapsed_time(e)) for e in pair] for pair in self._events]
        return [Interval(issued.op, *pair) for issued, pair in zip(self.issued, at, strict=True)]

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True) if self.on_gpu else None
        if event is not None:
            event.record()
        return event
