"""Nodes of an elastic run, all on this machine, which a test starts and kills: scripts/launch.sh --elastic."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.helpers.programs import ROOT, WarmProgram, descendants, free_port

STORE = "elastic.store_process"  # in the command of the store's process
LOST_SECONDS = 8  # as a user's
NEVER_LOST = 600  # where no node is lost, and the machine may be busy


class ElasticRun:
    """A run on nodes of one rank. Close it: a `with` ends all that it started."""

    def __init__(
        self, folder: Path, nodes: str, flags: list[object], program: Path | None = None, lost: int = LOST_SECONDS
    ) -> None:
        """Prepare a run.

        Args:
            nodes: MIN:MAX.
            program: instead of pretrain_gpt.py, a program that takes `folder` and `flags`.
            lost: seconds without a sign of life after which a node is lost.

        Nodes that are started next wait `wait` minutes for MIN nodes, and have `ranks` ranks. With `program`, their
        clocks are `ahead` seconds fast.
        """
        self.ranks, self.ahead = 1, 0
        self.folder, self.nodes, self.flags, self.wait = folder, nodes, [str(flag) for flag in flags], 5.0
        self.lost = lost
        self.port, self.program = free_port(), program
        self.running: dict[str, subprocess.Popen[bytes] | WarmProgram] = {}

    def __enter__(self) -> ElasticRun:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            print(*(f"== {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("node-*.log"))))
        self.kill(*self.running)
        self.kill_store()

    def start(self, *names: str) -> None:
        """Start nodes; one of a name that was lost is that machine, which came back."""
        for name in names:
            env = {"MEGAZERO_NODE": name, "OMP_NUM_THREADS": "1", "ELASTIC_LOST_SECONDS": str(self.lost)}
            if "--save" not in self.flags:  # else the secret is in that folder
                env["ELASTIC_SECRET"] = "of these nodes"
            out = self.folder / f"node-{name}.log"
            self.running[name] = self._warm(env, out) if self.program else self._cold(env, out)

    def _cold(self, env: dict[str, str], out: Path) -> subprocess.Popen[bytes]:
        """Start a node as a user does."""
        command = ["bash", ROOT / "scripts" / "launch.sh", "--nproc", str(self.ranks), "--elastic", self.nodes]
        command += ["--wait", str(self.wait), "--rdzv-endpoint", f"localhost:{self.port}", *self.flags]
        foreign = ("SLURM", "TORCHELASTIC", "MASTER_")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        with open(out, "ab") as file:
            env = {**inherited, **env, "PYTHON": sys.executable}
            return subprocess.Popen(command, cwd=self.folder, env=env, stdout=file, stderr=file)

    def _warm(self, env: dict[str, str], out: Path) -> WarmProgram:
        """Start a node as launch.sh does, in a process that has imported torch already."""
        words = [self.folder / "ranks", self.wait, "--nnodes", self.nodes, "--nproc-per-node", self.ranks, "--role", ""]
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{self.port}", "--redirects", 3, "--tee", 3]
        env = {**env, "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "${role_name}"}
        words += [self.program, self.folder, *self.flags]
        if self.ahead:
            return WarmProgram("tests/end_to_end/fast_clock.py", [self.ahead, *words], env, (out, out))
        return WarmProgram("megazero/cluster/launch_ranks.py", words, env, (out, out))

    def processes(self, name: str) -> list[int]:
        """The agent of a node, then its rank."""
        found = descendants(self.running[name].pid)
        return [pid for pid in found if STORE not in command_of(pid)]

    def kill(self, *names: str) -> None:
        """End nodes as by power cuts: agents and ranks at once."""
        victims = [pid for name in names for pid in self.processes(name)]
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for name in names:
            self.running.pop(name).wait()

    def store(self) -> int | None:
        """The store's process; None if there is none."""
        for path in Path("/proc").glob("[0-9]*"):
            words = command_of(int(path.name))
            if STORE in words and words.rstrip("\0").endswith(f"\0{self.port}"):
                return int(path.name)
        return None

    def kill_store(self) -> None:
        while (pid := self.store()) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)

    def said(self, name: str) -> str:
        return (self.folder / f"node-{name}.log").read_text()

    def everything(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("node-*.log")))

    def until(self, happened: Callable[[], Any]) -> None:
        """Wait for it, as long as a node runs."""
        while not happened():
            alive = [node for node in self.running.values() if node.poll() is None]
            assert alive or happened(), self.everything()
            time.sleep(0.05)

    def metrics(self, log_dir: Path | None = None) -> list[dict[str, Any]]:
        """The records of this run, or of another one; not a line that is being written."""
        path = (log_dir or self.folder / "log") / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    @property
    def iteration(self) -> int:
        return max((record["iteration"] for record in self.metrics()), default=0)

    def trained(self, iteration: int) -> None:
        self.until(lambda: self.iteration >= iteration)

    def generation(self, number: int, *nodes: str) -> None:
        """Wait until a node, or each of `nodes`, reports that one has begun."""
        logs = [partial(self.said, node) for node in nodes] or [self.everything]
        self.until(lambda: all(f"generation {number}: " in log() for log in logs))

    def together(self, *nodes: str, after: int = -1) -> int:
        """Wait for a generation later than `after` of exactly these nodes, and return its number.

        There may be others before it: the agents do not wait for a node whose agent is slow.
        """

        def newest(node: str) -> tuple[int, int]:
            found = re.findall(r"generation (\d+): (\d+) nodes?", self.said(node))
            return (int(found[-1][0]), int(found[-1][1])) if found else (-1, 0)

        def agree() -> int | None:
            (number, size), *others = {newest(node) for node in nodes}
            return number if number > after and size == len(nodes) and not others else None

        self.until(lambda: agree() is not None)
        return newest(nodes[0])[0]

    def end(self) -> dict[str, int]:
        """Wait for the end of all nodes: their exit codes."""
        return {name: node.wait() for name, node in self.running.items()}


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
