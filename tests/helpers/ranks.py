"""`Ranks`: processes of one group that stay alive and run one function after the other, for tests and benchmarks.

There are two ways to start them: `Forked`, from a clean process that has imported torch (fast), or `Program`, by a
Python of their own, with an environment and a tree of their own (peers, old revisions). `Program` runs this file, which
imports nothing but torch.
"""

from __future__ import annotations

import datetime
import faulthandler
import gc
import multiprocessing as mp
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[2]
STACKS_SECONDS = 440.0  # after which a rank of a test prints its stacks: it hangs


class RankError(AssertionError):
    """The error that a rank raised, with its traceback."""


@dataclass(frozen=True)
class Group:
    """The group that a rank joins.

    Attributes:
        rendezvous: path of a file that all ranks see, and that does not exist yet.
        gpus: use GPUs and NCCL where there are any.
        reuse_groups: `dist.new_group` returns a group that an earlier function made, where it has the same ranks.
    """

    rank: int
    world: int
    rendezvous: str
    gpus: bool = False
    reuse_groups: bool = False


class Process(Protocol):
    """A process of either kind."""

    def kill(self) -> None: ...


class Start(Protocol):
    """A way to start a rank."""

    def __call__(self, group: Group, connection: Connection, log: Path) -> tuple[Process, Callable[[float], bool]]:
        """Start a rank at the other end of `connection`; return it, and a function: has it ended within seconds?"""
        ...


class Forked:
    """Start ranks from a clean process ("forkserver"): forking one that has run autograd can deadlock."""

    def __init__(self, preload: list[str]) -> None:
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(preload)

    def __call__(self, group: Group, connection: Connection, log: Path) -> tuple[Process, Callable[[float], bool]]:
        process = self._context.Process(target=serve, args=(group, connection), daemon=True)
        process.start()

        def ended(seconds: float) -> bool:
            process.join(seconds)
            return not process.is_alive()

        return process, ended


@dataclass(frozen=True)
class Program:
    """Start ranks with a Python of their own.

    Attributes:
        root: the tree whose modules they import.
        env: beyond this process' own.
    """

    python: str = sys.executable
    root: Path = ROOT
    env: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, group: Group, connection: Connection, log: Path) -> tuple[Process, Callable[[float], bool]]:
        place = {"RANK": group.rank, "LOCAL_RANK": group.rank, "WORLD_SIZE": group.world}
        flags = [
            group.rank,
            group.world,
            group.rendezvous,
            int(group.gpus),
            int(group.reuse_groups),
            connection.fileno(),
        ]
        with log.open("a") as out:
            process = subprocess.Popen(
                [self.python, str(self.root / "tests" / "helpers" / "ranks.py"), *map(str, flags)],
                stdout=out,
                stderr=out,
                pass_fds=[connection.fileno()],
                env={**os.environ, **self.env, **{name: str(value) for name, value in place.items()}},
            )

        def ended(seconds: float) -> bool:
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                return False
            return True

        return process, ended


class Ranks:
    """`world` ranks; `run(fn, *args)` calls fn(rank, *args) on each and returns their results in order.

    They start at the first call. After an error they are ended, and the next call starts new ones.
    """

    def __init__(
        self, world: int, start: Start, seconds: float = 480.0, gpus: bool = False, reuse_groups: bool = False
    ) -> None:
        """`seconds`: ranks that have not answered until then hang. `gpus`, `reuse_groups`: see `Group`."""
        self.world, self._starter, self._seconds = world, start, seconds
        self._gpus, self._reuse_groups = gpus, reuse_groups
        self._connections: list[Connection] = []
        self._processes: list[tuple[Process, Callable[[float], bool]]] = []

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="megazero-ranks-")
        self.log = Path(self._folder.name, "log")
        for rank in range(self.world):
            group = Group(rank, self.world, str(Path(self._folder.name, "store")), self._gpus, self._reuse_groups)
            ours, theirs = mp.Pipe()
            self._processes.append(self._starter(group, theirs, self.log))
            self._connections.append(ours)
            theirs.close()

    def tell(self, fn: Callable[..., Any], *args: Any) -> None:
        """Have every rank call fn(rank, *args); `hear` returns the results."""
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((fn, args))

    def hear(self) -> list[Any]:
        """Return every rank's result of the last `tell`.

        Raises:
            RankError: with the first traceback, when any rank raises, ends or hangs.
        """
        try:
            return self._hear()
        except BaseException:  # pytest's limit of seconds too: the next call must not get this call's results
            self.stop(kill=True)
            raise

    def _hear(self) -> list[Any]:
        found: dict[int, Any] = {}
        until = time.monotonic() + self._seconds
        while len(found) < self.world:
            waiting = [c for rank, c in enumerate(self._connections) if rank not in found]
            ready = wait(waiting, timeout=max(0.0, until - time.monotonic()))
            if not ready:
                missing = sorted(set(range(self.world)) - set(found))
                self._fail(f"ranks {missing} did not answer in {self._seconds:g} s")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = self._connections.index(connection)
                try:
                    found[rank], error = connection.recv()
                except (EOFError, ConnectionError):
                    error = "it ended"
                if error is not None:
                    self._fail(f"rank {rank}:\n{error}")
        return [found[rank] for rank in range(self.world)]

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Raises RankError as `hear` does."""
        self.tell(fn, *args)
        return self.hear()

    def _fail(self, message: str) -> None:
        said = self.log.read_text()[-3000:] if self.log.exists() else ""
        raise RankError(f"{message}\n{said}".strip()) from None

    def stop(self, kill: bool = False) -> None:
        """End all ranks: by themselves, or with `kill` at once."""
        for connection in self._connections:
            connection.close()  # the end of input ends a rank
        for process, ended in self._processes:
            if kill or not ended(30):
                process.kill()
                ended(30)
        if self._processes:
            self._folder.cleanup()
        self._connections, self._processes = [], []


def serve(group: Group, connection: Connection) -> None:
    """Be a rank: join the group, and make the calls that arrive over the connection until it is closed."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(int(os.environ.get("TEST_THREADS", "1")))  # tests/machines.py sets it
    warnings.filterwarnings("ignore", category=UserWarning)
    on_gpu = group.gpus and torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(group.rank)
    if group.world > 1 or not group.reuse_groups:  # a test on one rank is a run without a group
        store = dist.FileStore(group.rendezvous, group.world)
        limit = datetime.timedelta(minutes=10)  # DeepSpeed compiles at its first use
        dist.init_process_group(
            "nccl" if on_gpu else "gloo", store=store, rank=group.rank, world_size=group.world, timeout=limit
        )
    groups = _Groups() if group.reuse_groups else None
    gc.freeze()  # imported modules stay: a collection then looks only at objects that functions leave behind
    if groups is not None:
        gc.set_threshold(20_000, 20, 20)  # there is one after each function
    while True:
        try:
            fn, args = connection.recv()
        except (EOFError, ConnectionError):
            break
        if groups is not None:  # a test's; Ranks gives it up soon after
            faulthandler.dump_traceback_later(STACKS_SECONDS)
        try:
            answer = fn(group.rank, *args), None
            if groups is not None:
                groups.give_back()
        except BaseException:
            answer = None, traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        connection.send(answer)
    if groups is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # without the end of all groups, one after the other
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


class _Message:
    """A message in flight, until it has been waited for."""

    def __init__(self, work: Any, in_flight: dict[_Message, None]) -> None:
        self._work, self._in_flight = work, in_flight
        in_flight[self] = None

    def wait(self) -> Any:
        self._in_flight.pop(self, None)
        return self._work.wait()


class _Groups:
    """Groups that functions made with `dist.new_group`, kept for later functions.

    Making groups takes a tenth of a small test's time. All ranks make the same calls in the same order, so all find the
    same groups here. Those of one function are distinct.

    Note [messages in flight]: an engine under ZeRO 1 and 2 ends a step with updated weights in flight. A message that
    is dropped before it arrived blocks its two ranks' connection for good: the next collective of the group hangs, or
    the end of the group. So every operation that a function leaves in flight is waited for.
    """

    MOST = 40  # each has a thread that wakes up a hundred times a second

    def __init__(self) -> None:
        import torch.distributed as dist

        self._dist, self._make, dist.new_group = dist, dist.new_group, self.new_group
        self._made: defaultdict[tuple[Any, ...], list[Any]] = defaultdict(list)
        self._used: Counter[tuple[Any, ...]] = Counter()  # by the function that runs
        self._in_flight: dict[_Message, None] = {}
        dist.isend, dist.irecv = self._recorded(dist.isend), self._recorded(dist.irecv)

    def _recorded(self, start: Callable[..., Any]) -> Callable[..., _Message | None]:
        def call(*args: Any, **kwargs: Any) -> _Message | None:
            work = start(*args, **kwargs)
            return None if work is None else _Message(work, self._in_flight)  # None: the rank is outside the group

        return call

    def new_group(
        self,
        ranks: list[int] | None = None,
        timeout: datetime.timedelta | None = None,
        backend: str | None = None,
        group_desc: str | None = None,
    ) -> Any:
        """Return a group as `dist.new_group` does, but one that this function has not got yet."""
        key = tuple(ranks or ()), timeout, backend, group_desc
        made, number = self._made[key], self._used[key]
        if number == len(made):
            made.append(self._make(ranks, timeout, backend, group_desc=group_desc))
        self._used[key] += 1
        return made[number]

    def give_back(self) -> None:
        """Have the next function use all groups."""
        for message in list(self._in_flight):
            message.wait()
        self._used.clear()
        if sum(map(len, self._made.values())) > self.MOST:
            self._dist.barrier()  # others may still read this rank's messages
            for group in (group for made in self._made.values() for group in made):
                self._dist.destroy_process_group(group)
            self._made.clear()
        gc.collect()  # an engine is often part of a reference cycle


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    from tests.helpers import ranks

    rank, world, rendezvous, gpus, reuse, descriptor = sys.argv[1:]
    ranks.serve(ranks.Group(int(rank), int(world), rendezvous, gpus == "1", reuse == "1"), Connection(int(descriptor)))
