"""Vector clocks of the host, of streams and of communicators.

`StreamSynchronizations` is the model of CUDA's order that torch's own sanitizer has (TORCH_CUDA_SANITIZER=1), and it
serves here as it is. The rest of that sanitizer does not: `EventHandler` compares addresses at which tensors begin, so
that overlapping windows of one buffer are different tensors to it, forgets an access when its tensor is freed, and
takes a stack trace per operator. It knows neither the host nor communicators: both are streams of their own here.
"""

import itertools

from torch.cuda._sanitizer import StreamSynchronizations

HOST = 0  # a line; others are the device's streams and communicators
ISSUED = 0  # an event: the host's latest operation
Line = int
Tick = int


class Clocks:
    """Clock of every line: the operations of other lines that its next one is ordered behind.

    A line is a sequence of operations in a fixed order: the host, a stream, or a communicator. An operation has a tick,
    and is ordered before a line's next operation if the line's clock has reached that tick.
    """

    def __init__(self) -> None:
        self._order = StreamSynchronizations()
        self._ticks, self._events = itertools.count(1), itertools.count(ISSUED + 1)
        self._order.create_event(ISSUED)
        self.names = ["the host"]
        self._last: dict[Line, Tick] = {}
        self._told: set[Line] = set()  # lines whose clocks have the host's latest

    def new_line(self, name: str) -> Line:
        """Make a stream or a communicator; its operations are ordered behind all that the host has waited for."""
        self.names.append(name)
        line = len(self.names) - 1
        self._order.create_stream(line)
        return line

    def new_event(self) -> int:
        event = next(self._events)
        self._order.create_event(event)
        return event

    def issue(self, line: Line) -> Tick:
        """Begin the next operation of a line: behind its earlier ones, and behind everything that the host has done."""
        if line == HOST:
            self._told.clear()
        elif line not in self._told:
            self._order.record_state(ISSUED, HOST)
            self._order.stream_wait_for_event(line, ISSUED)
            self._told.add(line)
        tick = next(self._ticks)
        self._order.update_seq_num(line, tick)
        self._last[line] = tick
        return tick

    def record(self, event: int, line: Line) -> None:
        self._order.record_state(event, line)

    def wait(self, line: Line, event: int) -> None:
        """Order a line's next operations behind an event; one that was never recorded orders nothing."""
        self._order.stream_wait_for_event(line, event)

    def is_done(self, line: Line) -> bool:
        """Return true if the host knows that a line has nothing left to do."""
        return line not in self._last or self.is_ordered(self._last[line], line, HOST)

    def has_passed(self, event: int) -> bool:
        """Return true if the host knows that the device has passed an event."""
        recorded = self._order.recorded_sync_states[event]
        return all(tick == 0 or self.is_ordered(tick, line, HOST) for line, tick in recorded.items())

    def host_waits_for_event(self, event: int) -> None:
        self._order.all_streams_wait_for_event(event)

    def host_waits_for_line(self, line: Line) -> None:
        self._order.all_streams_wait_for_stream(line)

    def host_waits_for_all(self) -> None:
        self._order.sync_all_streams()

    def is_ordered(self, tick: Tick, line: Line, before: Line) -> bool:
        """Return true if the operation `tick` of `line` is done when the next one of the line `before` begins."""
        return line == before or self._order.is_ordered_after(before, tick, line)
