"""`LiveReport`: report.html while the run trains, written by a process next to it.

    python -m megazero.observe.report.live FOLDER

is that process. It has the lowest priority, so that it takes only time that training leaves, and imports no torch.
"""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megazero.observe.progress_line import Record

RELOAD_SECONDS = 30  # of the page, and at least between two processes
SHARE = 50  # a process begins when this many times the seconds of the last one have passed
CPU_SECONDS = 60  # after which the system ends one
END_SECONDS = 5.0  # for the process to delete its unfinished file


class LiveReport:
    """A writer of `loggers` that keeps report.html of a log folder: one process at a time, at most 2 % of the time."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder, self.clock = folder, clock
        self.process: subprocess.Popen[str] | None = None
        self.began = clock()
        self.due = self.began + RELOAD_SECONDS

    def write(self, record: Record) -> None:
        """Start a process if it is time to.

        Raises:
            RuntimeError: the last one failed.
        """
        now = self.clock()
        if self.process is not None and self.process.poll() is not None:
            self.due = now + max(RELOAD_SECONDS, SHARE * (now - self.began))
            (_, said), code = self.process.communicate(), self.process.returncode
            self.process = None
            if code > 0:  # below 0: a signal, such as that of Ctrl-C
                raise RuntimeError("".join(said.splitlines()[-1:]))
        if self.process is None and now >= self.due:
            command, nowhere = [sys.executable, "-m", __name__, str(self.folder.resolve())], subprocess.DEVNULL
            self.began = now
            self.process = subprocess.Popen(
                command, cwd=Path(__file__).parents[3], stdin=nowhere, stdout=nowhere, stderr=subprocess.PIPE, text=True
            )

    def close(self) -> None:
        """End the process. The run writes the last page itself."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.communicate(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()


def write_live(folder: str) -> None:
    """Write the page of a log folder, as a process of its own."""
    from megazero.observe.report.page import write_report  # not in the process that trains

    os.nice(19)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # the unfinished file is deleted
    with contextlib.suppress(FileNotFoundError):  # the folder is gone
        write_report(Path(folder), live=RELOAD_SECONDS)


if __name__ == "__main__":
    write_live(sys.argv[1])
