"""Systems in their own processes, which stay alive and take turns: shared by the benchmarks over several ranks."""

import ctypes
import dataclasses
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measure import interval
from benchmarks.peers import Work
from benchmarks.rank import obey
from tests.helpers.ranks import ROOT, Program, RankError, Ranks

CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Job:
    """One system and its work.

    Attributes:
        module: its table SYSTEMS has the system.
        env: beyond this process' own.
    """

    system: str
    work: Work
    module: str
    python: str = sys.executable
    env: dict[str, str] = field(default_factory=dict)


class Processes:
    """All ranks of one system, which carry out the commands of `rank.Rank`."""

    def __init__(self, job: Job) -> None:
        self.system, self.num_ranks = job.system, job.work.ranks
        self.made_of = job.module, job.system, json.dumps(dataclasses.asdict(job.work))
        # A peer compiles for minutes at its first use.
        self.ranks = Ranks(self.num_ranks, Program(job.python, ROOT, job.env), seconds=1800, gpus=True)

    def tell(self, *command: Any) -> None:
        self.ranks.tell(obey, self.made_of, *command)

    def hear(self) -> list[dict[str, Any]]:
        """Return every rank's answer to the last command."""
        try:
            return self.ranks.hear()
        except RankError as error:
            raise RuntimeError(f"{self.system} failed: {error}") from None

    def ask(self, *command: Any) -> list[dict[str, Any]]:
        self.tell(*command)
        return self.hear()

    def stop(self) -> None:
        self.ranks.stop()


@contextmanager
def alive(jobs: Sequence[Job]) -> Iterator[list[Processes]]:
    """Start the processes of several systems, and end them on exit."""
    env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    with ExitStack() as stack:
        systems = []
        for job in jobs:
            systems.append(Processes(dataclasses.replace(job, env={**env, **job.env})))
            stack.callback(systems[-1].stop)
        yield systems


def isolate() -> bool:
    """Move to a network namespace whose loopback carries this run alone; False where that is not allowed."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return False
    if subprocess.run(["unshare", "-n", "ip", "link", "set", "lo", "up"], capture_output=True).returncode:
        return False
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        return False
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    return True


def carried() -> int:
    """Bytes that the loopback has sent so far, headers included."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    return 0


def take_turns(systems: Sequence[Processes], rounds: int, steps: int, isolated: bool) -> dict[str, dict[str, Any]]:
    """Per system, of every turn: a step's seconds, CPU seconds and, if the network is this run's alone, bytes that a
    rank puts on the wire. Backwards, then forwards: neighbours stay neighbours.
    """
    found: dict[str, dict[str, Any]] = {s.system: {"seconds": [], "cpu": [], "wire": []} for s in systems}
    for turn in range(rounds):
        for system in systems if turn % 2 else reversed(systems):
            before = carried() if isolated else 0
            answers = system.ask("timed", steps)
            for kind in ("seconds", "cpu"):
                found[system.system][kind].append(max(answer[kind] for answer in answers))
            if isolated:
                found[system.system]["wire"].append((carried() - before) / steps / system.num_ranks)
    return found


def shown(values: list[float], digits: int) -> str:
    """Median and 95 % interval."""
    low, high = interval(values)
    return f"{statistics.median(values):.{digits}f} [dim]{low:.{digits}f}-{high:.{digits}f}[/]"


def quotients(above: list[float], below: list[float]) -> list[float]:
    """Turn by turn."""
    return [a / b for a, b in zip(above, below, strict=True)]
