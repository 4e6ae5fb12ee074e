"""Systems in processes of their own, which stay alive and take turns: what benchmarks over several ranks share."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measure import interval
from benchmarks.peers import Work

ROOT = Path(__file__).resolve().parent.parent
CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Job:
    """One system and what it is to do.

    Attributes:
        module: where the table SYSTEMS has it.
        env: beyond this process' own.
        root: the tree whose `benchmarks` and megazero the ranks import.
    """

    system: str
    work: Work
    module: str
    python: str = sys.executable
    env: dict[str, str] = field(default_factory=dict)
    root: Path = ROOT


class Processes:
    """All ranks of one system."""

    def __init__(self, job: Job) -> None:
        self.system, self.num_ranks = job.system, job.work.ranks
        self.folder = tempfile.TemporaryDirectory(prefix="megazero-bench-")
        self.said = Path(self.folder.name, "stderr")
        rendezvous = str(Path(self.folder.name, "store"))
        arguments = [job.module, job.system, json.dumps(dataclasses.asdict(job.work))]
        self.ranks = []
        for rank in range(job.work.ranks):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job.work.ranks}
            with self.said.open("a") as said:
                self.ranks.append(
                    subprocess.Popen(
                        [job.python, str(job.root / "benchmarks" / "rank.py"), *arguments, str(rank), rendezvous],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=said,
                        text=True,
                        env={**os.environ, **job.env, **{name: str(value) for name, value in place.items()}},
                    )
                )

    def tell(self, *command: Any) -> None:
        for process in self.ranks:
            assert process.stdin is not None
            process.stdin.write(json.dumps(command) + "\n")
            process.stdin.flush()

    def hear(self) -> list[dict[str, Any]]:
        """Every rank's answer to the last command."""
        answers = []
        for process in self.ranks:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"{self.system} failed:\n{self.said.read_text()[-3000:]}")
            answers.append(json.loads(line))
        return answers

    def ask(self, *command: Any) -> list[dict[str, Any]]:
        self.tell(*command)
        return self.hear()

    def stop(self) -> None:
        for process in self.ranks:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
        for process in self.ranks:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
        self.folder.cleanup()


@contextmanager
def alive(jobs: Sequence[Job]) -> Iterator[list[Processes]]:
    """The processes of several systems, each of which is ended whatever happens."""
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
