"""`Watchdog`: ends a run in which this rank makes no progress."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

from megazero.engine.plan.program.operations import Op, name_of
from megazero.engine.step.interpreter import Interpreter


class Activity(NamedTuple):
    """The current work of a rank, which makes progress as long as this changes."""

    doing: str  # such as "reading the batch of iteration 7"; empty: not watched
    operation: Op | None
    since: float  # begin of the operation

    def __str__(self) -> str:
        return f"operation {name_of(self.operation)!r} of {self.doing}" if self.operation is not None else self.doing


class Watchdog:
    """Calls `end` from its own thread when nothing has happened for `minutes`; with 0, never.

    Note [a stopped process]: the watchdog counts its own ticks, not the time of a clock, because a job may be
    suspended. Its thread then stops ticking too.

    Attributes:
        doing: the current work of the run, also between operations. Set it to "" for waits with their own limit.
    """

    def __init__(self, minutes: float, end: Callable[[str], None]) -> None:
        """`end` is called with a phrase: "has been in operation 'forward blocks.0 0' of iteration 7 for 60 s"."""
        self._limit, self._end = 60 * minutes, end
        self._over = threading.Event()
        self.doing = ""

    @contextlib.contextmanager
    def over(self, interpreter: Interpreter) -> Iterator[None]:
        """Watch within the context."""
        if self._limit:
            threading.Thread(target=self._watch, args=(interpreter,), name="watchdog", daemon=True).start()
        try:
            yield
        finally:
            self._over.set()

    def _watch(self, interpreter: Interpreter) -> None:
        tick = min(5.0, self._limit / 20)
        seen, stuck = None, 0.0
        while not self._over.wait(tick):
            now = Activity(self.doing, interpreter.current, interpreter.since)
            stuck = stuck + tick if now == seen and now.doing else 0.0
            seen = now
            if stuck >= self._limit:
                self._end(f"has been in {now} for {stuck:.0f} s")
                return
