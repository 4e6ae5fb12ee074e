"""Stop random processes of a command for a moment, as a loaded machine does: `python -m tests.jitter -- COMMAND`.

A test that fails under it depends on which process runs first. A process that the command itself has stopped is left
alone. The exit status is the command's.
"""

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.helpers.programs import descendants

AT_ONCE, SHARE = 3, 1 / 3  # processes that are stopped at a time, at most; and of all processes
SHORTEST, LONGEST = 0.05, 1.5  # seconds of a stop
PAUSE = 0.12, 0.38  # seconds between two stops, from least to most


def state(pid: int) -> str:
    """Return the state of a process, such as R, S or T (stopped); empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class Jitter:
    """Stops of descendants of a process, in an order that `seed` decides as far as the processes allow."""

    def __init__(self, pid: int, seed: int) -> None:
        self.pid, self.draw = pid, random.Random(seed)
        self.count = 0
        self.stopped: dict[int, float] = {}  # process -> end of its stop

    def turn(self) -> None:
        """End the stops that are over, and begin another one."""
        now = time.monotonic()
        for pid in [pid for pid, until in self.stopped.items() if until <= now]:
            self._resume(pid)
        running = [
            pid for pid in descendants(self.pid)[1:] if pid not in self.stopped and state(pid) in ("R", "S", "D")
        ]
        if len(self.stopped) + 1 <= min(AT_ONCE, SHARE * (len(running) + len(self.stopped))):
            pid = self.draw.choice(sorted(running))
            self.stopped[pid] = now + self.draw.uniform(SHORTEST, LONGEST)
            self.count += 1
            send(pid, signal.SIGSTOP)

    def _resume(self, pid: int) -> None:
        del self.stopped[pid]
        send(pid, signal.SIGCONT)

    def end(self) -> None:
        for pid in list(self.stopped):
            self._resume(pid)


def run(command: Sequence[str], seed: int) -> int:
    """Run a command under jitter to its end, and return its exit status."""
    process = subprocess.Popen(command)
    jitter = Jitter(process.pid, seed)
    try:
        while process.poll() is None:
            jitter.turn()
            time.sleep(jitter.draw.uniform(*PAUSE))
    finally:
        jitter.end()
    print(f"jitter: {jitter.count} stops, seed {seed}; exit status {process.returncode}", flush=True)
    return process.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("command", nargs="+")
    flags = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # no process stays stopped
    return run(flags.command, flags.seed)


if __name__ == "__main__":
    sys.exit(main())
