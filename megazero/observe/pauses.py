"""`Pauses`: the seconds between steps in which a run does something else, by cause."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator

# key of `pause_seconds` in metrics.jsonl and events.jsonl -> cause in report.html
PAUSES = {
    "save": "saves that stop training",
    "memory_save": "saves to memory that stop training",
    "export": "exports",
    "evaluation": "evaluation",
    "samples": "text samples",
    "tasks": "scores of tasks",
}


class Pauses:
    """Measures pauses of this rank."""

    def __init__(self) -> None:
        self._seconds = defaultdict[str, float](float)

    @contextlib.contextmanager
    def of(self, cause: str) -> Iterator[None]:
        """Count the time within as a pause. cause: a key of PAUSES."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[cause] += time.perf_counter() - start

    def take(self) -> dict[str, dict[str, float]]:
        """Return the pauses since the last call, as `pause_seconds`; nothing if there were none."""
        taken, self._seconds = dict(self._seconds), defaultdict(float)
        return {"pause_seconds": taken} if taken else {}
