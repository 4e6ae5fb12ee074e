"""Streams and events: `torch.cuda.Stream` and `torch.cuda.Event` on the pretended GPU."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.pretended_gpu.clocks import Clocks, Line
from tests.pretended_gpu.findings import Findings


class Streams:
    """The streams of a device. `current`: the one that operators are issued to."""

    def __init__(self, clocks: Clocks, findings: Findings) -> None:
        self.clocks, self.findings = clocks, findings
        self._numbers = itertools.count(1)
        self.current = Stream(self, name="the compute stream")

    def new_stream(self, device: Any = None, priority: int = 0) -> Stream:
        return Stream(self, name=f"stream {next(self._numbers)}")

    def new_event(self, enable_timing: bool = False, blocking: bool = False) -> Event:
        return Event(self)

    def current_stream(self, device: Any = None) -> Stream:
        return self.current

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def synchronize(self, device: Any = None) -> None:
        self.findings.waits.append("torch.cuda.synchronize")
        self.clocks.host_waits_for_all()


class Event:
    """A point of a stream."""

    def __init__(self, streams: Streams) -> None:
        self._streams, self.number = streams, streams.clocks.new_event()
        self._seconds = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._seconds = time.perf_counter()
        self._streams.clocks.record(self.number, (stream or self._streams.current).line)

    def wait(self, stream: Stream | None = None) -> None:
        self._streams.clocks.wait((stream or self._streams.current).line, self.number)

    def synchronize(self) -> None:
        if not self._streams.clocks.has_passed(self.number):
            self._streams.findings.waits.append("Event.synchronize")
        self._streams.clocks.host_waits_for_event(self.number)

    def query(self) -> bool:
        """Return true: the device is as fast as can be. The host knows then that it has passed the event."""
        self._streams.clocks.host_waits_for_event(self.number)
        return True

    def elapsed_time(self, end: Event) -> float:
        """Return milliseconds of the CPU: a device that computes at once."""
        return 1e3 * (end._seconds - self._seconds)


class Stream:
    """A stream. `line`: its place in the clocks."""

    def __init__(self, streams: Streams, name: str) -> None:
        self._streams = streams
        self.line: Line = streams.clocks.new_line(name)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._streams)
        event.record(self)
        return event

    def synchronize(self) -> None:
        if not self._streams.clocks.is_done(self.line):
            self._streams.findings.waits.append("Stream.synchronize")
        self._streams.clocks.host_waits_for_line(self.line)
