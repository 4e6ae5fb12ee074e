"""Starts Python programs in processes forked from one that has imported torch already.

A new rank imports for four seconds before it does anything, and torchrun for three more; a test of ranks
do needs none of that. Each program is still a process of its own, with its own `__main__`, arguments, environment,
working folder, output, signals and exit code.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

# Clean processes are forked ("forkserver"), not this one: forking one that has run autograd can deadlock.
CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = ["tests.helpers.preloaded"]
CONTEXT.set_forkserver_preload(PRELOADED)


def python_path(*first: Path) -> str:
    """Return PYTHONPATH: `first`, then the folders of this process's that are outside of this repository."""
    carried = (path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path)
    return os.pathsep.join(map(str, (*first, *(path for path in carried if Path(path).resolve() != ROOT))))


STACKS = signal.SIGUSR2  # has a warm program print the stacks of all its threads


def _run(program: str, arguments: list[str], env: dict[str, str], output: tuple[str, str]) -> None:
    import torch

    for number, path in enumerate(output, 1):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
    faulthandler.register(STACKS, file=2)  # processes that it forks, such as data workers, inherit this
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(env)
    torch.set_num_threads(int(env["OMP_NUM_THREADS"]))  # torch read the variable when it was imported
    sys.argv = [program, *arguments]
    sys.path.insert(0, str((ROOT / program).parent))
    runpy.run_path(program, run_name="__main__")


class WarmProgram:
    """A running program, with the part of subprocess.Popen that tests use."""

    def __init__(
        self, program: object, arguments: list[object], env: dict[str, str], output: tuple[Path, Path]
    ) -> None:
        words = [str(word) for word in arguments]
        env = {**os.environ, "OMP_NUM_THREADS": os.environ.get("TEST_THREADS", "1"), **env}
        for path in output:
            path.touch()
        paths = tuple(map(str, output))
        self._process: Any = CONTEXT.Process(target=_run, args=(str(program), words, env, paths))
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self) -> int:
        self._process.join()
        return self._process.exitcode


def read_terminal(ours: int) -> str:
    """Return all that was written to a pseudo-terminal, whose other side is closed, and close it."""
    said = b""
    with contextlib.suppress(OSError):  # EIO at its end
        while part := os.read(ours, 1 << 16):
            said += part
    os.close(ours)
    return said.decode()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def rank_environment(rank: int, world: int, port: int) -> dict[str, str]:
    """The variables of one rank of `world`, all on this machine; rank 0 hosts the store."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1"}
    return {name: str(value) for name, value in ranks.items()}


def runs(pid: int) -> bool:
    """Return whether a process has not ended; one in state Z has, and its parent has not yet read its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def descendants(pid: int) -> list[int]:
    """A process and all that it started, except those that have ended."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(each for child in children for each in descendants(int(child)))]


def listening(pid: int) -> list[tuple[str, int]]:
    """Addresses and ports at which a process accepts connections."""
    links = [os.path.realpath(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
    inodes = {found[1] for link in links if (found := re.search(r"socket:\[(\d+)\]", link))}
    found = []
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and inode in inodes:
                words = bytes.fromhex(local.partition(":")[0])  # of four bytes, each in the machine's order
                address = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                found.append((socket.inet_ntop(family, address), int(local.partition(":")[2], 16)))
    return found


def own_address() -> str:
    """This machine's address on the way to others; empty if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return probe.getsockname()[0]
    return ""


def can_print_stacks(pid: int) -> bool:
    """Return whether it is a warm program, or a process that one forked."""
    caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (STACKS - 1) & 1)


def warm(program: str, *arguments: object, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """Run `ranks` copies of a program to their end: the first exit code that is not 0, and all that they printed."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "stdout", Path(folder) / "stderr"
        programs = [
            WarmProgram(program, list(arguments), rank_environment(rank, ranks, port) if ranks > 1 else {}, output)
            for rank in range(ranks)
        ]
        try:
            codes = [each.wait() for each in programs]
        finally:
            for each in programs:
                each.kill()
        code = next((code for code in codes if code), 0)
        stdout, stderr = (path.read_text() for path in output)
    return subprocess.CompletedProcess([program, *map(str, arguments)], code, stdout, stderr)
