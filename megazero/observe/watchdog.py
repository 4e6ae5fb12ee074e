"""`Watchdog`: notices that this rank makes no progress, and says where it is."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from megazero.plan.program.operations import Op, name_of


class Watched(Protocol):
    """The interpreter, as far as it is watched: the operation that it carries out now, and when it began."""

    current: Op | None
    since: float


class Place(NamedTuple):
    """The place of a rank in its run: it makes progress as long as this changes."""

    doing: str  # such as "reading the batch of iteration 7"; empty: not watched
    operation: Op | None
    since: float  # of the operation

    def __str__(self) -> str:
        return f"operation {name_of(self.operation)!r} of {self.doing}" if self.operation is not None else self.doing


class Watchdog:
    """Calls `end` from a thread of its own when nothing has happened for `minutes`; with 0, never.

    Note [a stopped process]: what is counted is the watchdog's own ticks, not the time of a clock. A job that is
    suspended, with this thread, makes no tick.

    Attributes:
        doing: what the run does now, outside of operations too. Set it to "" where a wait has a limit of its own.
    """

    def __init__(self, minutes: float, end: Callable[[str], None]) -> None:
        """`end` is called with a phrase: "has been in operation 'forward blocks.0 0' of iteration 7 for 60 s"."""
        self._limit, self._end = 60 * minutes, end
        self._over = threading.Event()
        self.doing = ""

    @contextlib.contextmanager
    def over(self, interpreter: Watched) -> Iterator[None]:
        """Watch for as long as the context lasts."""
        if self._limit:
            threading.Thread(target=self._watch, args=(interpreter,), name="watchdog", daemon=True).start()
        try:
            yield
        finally:
            self._over.set()

    def _watch(self, interpreter: Watched) -> None:
        tick = min(5.0, self._limit / 20)
        seen, stuck = None, 0.0
        while not self._over.wait(tick):
            now = Place(self.doing, interpreter.current, interpreter.since)
            stuck = stuck + tick if now == seen and now.doing else 0.0
            seen = now
            if stuck >= self._limit:
                self._end(f"has been in {now} for {stuck:.0f} s")
                return
