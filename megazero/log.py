"""`log` prints lines for the user. It is a logger of Python's `logging`.

| call | ranks that print | stream | line |
|---|---|---|---|
| log.info | rank 0 | stdout | text |
| log.warning | rank 0 | stderr | WARNING: text |
| log.error | every rank | stderr | text, or "rank 3: text" if there are several ranks |

The result of a command, such as the table of --plan, is printed, not logged.
"""

import contextlib
import io
import logging
import sys

from megazero.called_as import in_own_words

log = logging.getLogger("megazero")


class Console(logging.Handler):
    """Prints records. A full disk under stdout, or a closed pipe, does not end the run."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        super().__init__()
        self.rank, self.world_size = rank, world_size

    def emit(self, record: logging.LogRecord) -> None:
        text, stream = in_own_words(record.getMessage()), sys.stderr
        if record.levelno >= logging.ERROR:
            text = f"rank {self.rank}: {text}" if self.world_size > 1 else text
        elif self.rank > 0:
            return
        elif record.levelno == logging.WARNING:
            text = f"WARNING: {text}"
        else:
            stream = sys.stdout
        with contextlib.suppress(OSError, ValueError):  # ValueError: the stream is closed
            print(text, file=stream, flush=True)


def log_as(rank: int, world_size: int) -> None:
    """Set the rank of this process; without a call it is 0 of 1."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # as stderr: else a terminal without UTF-8 loses a whole text
        sys.stdout.reconfigure(errors="backslashreplace")
    log.handlers.clear()
    log.addHandler(Console(rank, world_size))


log.setLevel(logging.INFO)
log_as(0, 1)
