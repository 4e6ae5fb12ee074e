"""`Trace`: some iterations of all ranks as one file for chrome://tracing and ui.perfetto.dev.

A rank is a process of the file, named by its coordinates. Its tracks:

- compute: every operation of the program by its printed name, within a span per iteration. On a GPU this is the time
  of issue, and the track `device` has the time on the compute stream.
- dp, tp, pp, host: an asynchronous operation from its Start to the end of its Wait, on the axis that it uses. Spans of
  a track may not overlap, so operations in flight at once are on tracks `dp`, `dp 2`, ...
- a counter per kind of the memory tracker, and their total on the device, in bytes.

Arrows join a Send with its Recv on the other rank.

The format is the JSON object form of the Trace Event Format: complete events (X), counters (C), flows (s, f) and
metadata (M), times in microseconds.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megazero.checkpoint.messages import gather_over_mesh, wait_for_all
from megazero.engine.memory.tracker import KINDS, MemoryTracker
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.plan.program.operations import Op, Recv, Send, Start, Wait, name_of
from megazero.files import replacing
from megazero.observe.timeline import Interval, Timeline
from megazero.planner.layouts import coord_words
from megazero.planner.time.simulate import axis_of

Event = dict[str, Any]
COMPUTE, DEVICE = 0, 1  # tracks; those of axes follow
AXES = ("dp", "tp", "pp", "host")


class Trace:
    """Records this rank's part. All ranks make one at the same iteration, because a barrier aligns their clocks.

    Note [clocks]: time 0 of every rank is the instant at which it leaves a barrier. Ranks leave it at most about one
    network round trip apart, which bounds the error in the order of events of different ranks. A first barrier takes
    the wait for the slowest rank, and opens connections.
    """

    def __init__(self, mesh: Mesh, tracker: MemoryTracker) -> None:
        self.mesh, self.tracker = mesh, tracker
        self.events: list[Event] = []
        self._in_flight: dict[Op, int] = {}  # operation -> begin
        self._lanes: dict[str, list[int]] = {}  # axis -> per track: end of its last span
        self._iteration = 0
        for _ in range(2):
            wait_for_all(mesh)
        self.origin = time.perf_counter_ns()
        for kind in KINDS:
            self._count(kind)
        tracker.watch = self._count

    def iteration(self, number: int, timeline: Timeline) -> None:
        """Add an iteration that is over."""
        self._iteration = number
        self._span(f"iteration {number}", COMPUTE, timeline.begin, timeline.end)
        for op, begin, end in timeline.issued:
            self._span(name_of(op), COMPUTE, begin, end)
            if isinstance(op, Start):
                self._in_flight[op.op] = begin
            elif isinstance(op, Wait) and op.op in self._in_flight:
                self._asynchronous(Interval(op.op, self._in_flight.pop(op.op), end))
        if timeline.on_gpu:
            for op, begin, end in timeline.computed():
                self._span(name_of(op), DEVICE, begin, end)

    def write(self, path: Path) -> None:
        """Write the file of all ranks. All ranks call this; rank 0 writes.

        Raises:
            OSError: on rank 0, after it has received the parts of all the others.
        """
        self.tracker.watch = None
        now = time.perf_counter_ns()
        for op, begin in self._in_flight.items():  # not waited for yet
            self._asynchronous(Interval(op, begin, now))
        part = ",\n".join(json.dumps(event) for event in [*self._metadata(), *self.events])
        parts = gather_over_mesh(part.encode(), self.mesh)
        try:
            if self.mesh.rank == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
                with replacing(path) as file:
                    file.write(b'{"displayTimeUnit": "ms", "traceEvents": [\n' + next(parts))
                    for other in parts:
                        file.write(b",\n" + other)
                    file.write(b"\n]}\n")
        finally:
            for _ in parts:  # the other ranks send, even if the file cannot be written
                pass

    # -- events

    def _time(self, at: int) -> float:
        return (at - self.origin) / 1000

    def _span(self, name: str, track: int, begin: int, end: int) -> None:
        event = {"ph": "X", "name": name, "pid": self.mesh.rank, "tid": track}
        self.events.append(event | {"ts": self._time(begin), "dur": (end - begin) / 1000})

    def _asynchronous(self, interval: Interval) -> None:
        op, begin, end = interval
        lanes = self._lanes.setdefault(axis_of(op), [])
        lane = next((n for n, until in enumerate(lanes) if until <= begin), len(lanes))
        lanes[lane : lane + 1] = [end]
        track = self._track(axis_of(op), lane)
        self._span(name_of(op), track, begin, end)
        if isinstance(op, (Send, Recv)):
            self._arrow(
                op, track, begin if isinstance(op, Send) else end - 1
            )  # a time within the span, to be bound to it

    def _arrow(self, op: Send | Recv, track: int, at: int) -> None:
        """Add one half of an arrow between ranks; both halves have one id."""
        place = self.mesh.layout.coord(self.mesh.rank)
        known = (self._iteration, place.dp, place.cp, place.tp, op.what, op.to, op.micro_batch)
        event = {"cat": "message", "name": "message", "id": "/".join(map(str, known)), "ts": self._time(at)}
        half = {"ph": "s"} if isinstance(op, Send) else {"ph": "f", "bp": "e"}
        self.events.append(half | event | {"pid": self.mesh.rank, "tid": track})

    def _count(self, kind: str) -> None:
        now = self._time(time.perf_counter_ns())
        for name, value in ((kind, self.tracker.now[kind]), ("total on the device", self.tracker.total)):
            event = {"ph": "C", "name": f"memory: {name}", "pid": self.mesh.rank, "ts": now}
            self.events.append(event | {"args": {"bytes": value}})

    def _track(self, axis: str, lane: int) -> int:
        return 2 + AXES.index(axis) + lane * len(AXES)

    def _metadata(self) -> Iterator[Event]:
        """Name the process and its tracks, and set their order."""
        rank = self.mesh.rank
        about = {"ph": "M", "pid": rank}
        name = f"rank {rank}: {coord_words(self.mesh.layout.coord(rank))}"
        yield about | {"name": "process_name", "args": {"name": name}}
        yield about | {"name": "process_sort_index", "args": {"sort_index": rank}}
        tracks = [(COMPUTE, "compute", 0)]  # track, name, place from above
        if self.mesh.device.type == "cuda":
            tracks.append((DEVICE, "device", 1))
        for axis, lanes in self._lanes.items():
            for n in range(len(lanes)):
                tracks.append((self._track(axis, n), axis if n == 0 else f"{axis} {n + 1}", 1 + AXES.index(axis)))
        for track, name, order in tracks:
            yield about | {"tid": track, "name": "thread_name", "args": {"name": name}}
            yield about | {"tid": track, "name": "thread_sort_index", "args": {"sort_index": order}}
