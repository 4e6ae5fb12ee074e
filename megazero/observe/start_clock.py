"""The parts of a start, and the iterations that a resume computes again: for events.jsonl."""

import os
import time
from pathlib import Path
from typing import NamedTuple


class StartClock:
    """Seconds of each part of a start.

    Attributes:
        began: Unix time.
        parts: in order: process (imports, flags), checks, joining, model, checkpoint.
    """

    def __init__(self, began: float = 0.0) -> None:
        """began: Unix time; 0: now."""
        self.began = self._last = began or time.time()
        self.parts: dict[str, float] = {}

    def mark(self, part: str) -> None:
        """End a part."""
        now = time.time()
        self.parts[part], self._last = round(now - self._last, 3), now


def process_start() -> float:
    """Return the Unix time at which this process started; the time now on systems other than Linux."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # since the system started
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return time.time()


class Lost(NamedTuple):
    """Iterations after the checkpoint that a run resumes from.

    Attributes:
        seconds: of their steps.
        until: Unix time of the last one; 0 if nothing was recorded.
    """

    iterations: int = 0
    seconds: float = 0.0
    until: float = 0.0
