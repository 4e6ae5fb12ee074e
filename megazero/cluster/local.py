"""Ranks of this machine that a program starts itself: processes that join one group and call functions for it."""

import contextlib
import datetime
import multiprocessing
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist

from megazero.cluster.launch import choose_interface
from megazero.engine.mesh.peer_errors import PeerLost
from megazero.units import things

GRACE = 1.0  # seconds in which a rank that lost a peer may be followed by the report of its cause


class RankLost(Exception):
    """A rank raised an error, was killed or does not answer. The message is one sentence."""


def preload(modules: Iterable[str]) -> None:
    """Import modules in the process from which ranks are forked. Call it before the first `LocalRanks`."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))


class LocalRanks:
    """`world` ranks with one torch thread each, over gloo; or with `gpus`, on a GPU each, over NCCL."""

    def __init__(self, world: int, seconds: float, gpus: bool = False) -> None:
        """Start the ranks. seconds: in which each call must be answered."""
        self.world, self._seconds = world, seconds
        self._folder = tempfile.TemporaryDirectory(prefix="megazero-ranks-")
        self._connections: list[Connection] = []
        self._processes = []
        # A process that has run autograd must not be forked.
        context = multiprocessing.get_context("forkserver")
        for rank in range(world):
            ours, theirs = context.Pipe()
            rendezvous = str(Path(self._folder.name, "store"))
            process = context.Process(target=_serve, args=(rank, world, rendezvous, gpus, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._connections:
            connection.close()  # the end of input ends a rank
        for process in self._processes:
            if error is None:
                process.join(10)
            process.kill()
            process.join()
        self._folder.cleanup()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call function(rank, device, *arguments) on each rank; return the results in order of rank.

        Raises:
            RankLost: a rank fails, ends or takes too long. Leave the context then, which ends the others.
        """
        for connection in self._connections:
            with contextlib.suppress(OSError):  # it has ended; reading reports that
                connection.send((function, arguments))
        found: dict[int, Any] = {}
        failed: dict[int, BaseException | str] = {}
        until = time.monotonic() + self._seconds
        while len(found) < self.world:
            open_ranks = {self._connections[r]: r for r in range(self.world) if r not in found and r not in failed}
            ready = wait(list(open_ranks), timeout=max(0.0, until - time.monotonic()))
            for connection in [each for each in open_ranks if each in ready]:
                rank = open_ranks[connection]
                try:
                    result, error = connection.recv()
                except (EOFError, OSError):
                    failed[rank] = self._end(rank)
                    until = time.monotonic()
                    continue
                if error is None:
                    found[rank] = result
                else:
                    failed[rank] = error
                    until = min(until, time.monotonic() + GRACE)
            if not ready and len(found) < self.world:
                self._fail(failed, sorted(open_ranks.values()))
        return [found[rank] for rank in range(self.world)]

    def _end(self, rank: int) -> str:
        """Return how a process ended."""
        self._processes[rank].join(GRACE)
        code = self._processes[rank].exitcode
        return f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"

    def _fail(self, failed: dict[int, BaseException | str], silent: list[int]) -> NoReturn:
        ended = {rank: text for rank, text in failed.items() if isinstance(text, str)}
        for rank, text in ended.items():
            raise RankLost(f"rank {rank} {text}")
        own = {r: e for r, e in failed.items() if not isinstance(e, PeerLost)} or failed
        for rank, error in own.items():
            place = "".join(f" {note}" for note in getattr(error, "__notes__", [])[:1])
            raise RankLost(f"rank {rank} raised {type(error).__name__}: {error}{place}")
        who = ", ".join(map(str, silent))
        raise RankLost(f"{things(len(silent), 'rank')} ({who}) did not answer in {self._seconds:g} s")


def _serve(rank: int, world: int, rendezvous: str, gpus: bool, connection: Connection) -> None:
    """Be a rank: join the group, and make the calls that arrive until the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the ranks
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=UserWarning)
    device = torch.device("cpu")
    if gpus:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    if world > 1:
        choose_interface("")
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.FileStore(rendezvous, world),
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(minutes=2),
            device_id=device if device.type == "cuda" else None,
        )
    while True:
        try:
            function, arguments = connection.recv()
        except (EOFError, OSError):
            break
        answer: tuple[Any, Exception | None]
        try:
            answer = function(rank, device, *arguments), None
        except Exception as error:
            answer = None, _plain(error)
        try:
            connection.send(answer)
        except OSError:
            break
    os._exit(0)  # without the end of all groups, one after the other


def _plain(error: Exception) -> Exception:
    """Return an error of a type that the parent can read, with its notes."""
    kind = PeerLost if isinstance(error, PeerLost) else ValueError if isinstance(error, ValueError) else RuntimeError
    found = kind(str(error) if kind is not RuntimeError else f"{type(error).__name__}: {error}")
    for note in getattr(error, "__notes__", []):
        found.add_note(note)
    return found
