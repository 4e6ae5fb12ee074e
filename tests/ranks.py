"""Real ranks for tests: a pool of gloo processes that stays up for many cases."""

from __future__ import annotations

import itertools
import multiprocessing as mp
import os
import queue
import tempfile
import traceback
import warnings
from collections.abc import Callable
from typing import Any

SECONDS = 120  # no case takes nearly as long: past this the ranks hang


class RankError(AssertionError):
    """The error that a rank raised, with its traceback."""


def _leave_groups() -> None:
    """Every case makes groups of its own, each with a thread of gloo's that wakes up a hundred times a second: a few
    hundred of them, and the ranks do nothing else."""
    import torch.distributed as dist

    dist.barrier()  # others may still read what we have sent
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def _serve(rank: int, world: int, rendezvous: str, tasks: Any, results: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=UserWarning)
    if world > 1:
        store = dist.FileStore(rendezvous, world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    for number, fn, args in iter(tasks.get, None):
        try:
            result = fn(rank, *args)
            if world > 1:
                _leave_groups()
            results.put((number, rank, result, None))
        except BaseException:
            results.put((number, rank, None, traceback.format_exc()))
    if world > 1:
        dist.destroy_process_group()


class Ranks:
    """`world` ranks; `run(fn, *args)` calls fn(rank, *args) on each and returns their results in order.

    Started from a clean process ("forkserver"): forking one that has run autograd can deadlock.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "torch.distributed", "megazero.train.engine"])
        self._processes: list[Any] = []
        self._numbers = itertools.count()

    def _start(self) -> None:
        handle, path = tempfile.mkstemp(prefix="megazero-ranks-")
        os.close(handle)
        os.unlink(path)
        self._tasks = [self._context.Queue() for _ in range(self.world)]
        self._results = self._context.Queue()
        for rank in range(self.world):
            args = (rank, self.world, path, self._tasks[rank], self._results)
            self._processes.append(self._context.Process(target=_serve, args=args, daemon=True))
        for process in self._processes:
            process.start()

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Raises RankError with the first traceback when any rank raises or hangs; the pool starts anew after that."""
        if not self._processes:
            self._start()
        number = next(self._numbers)
        for tasks in self._tasks:
            tasks.put((number, fn, args))
        found: dict[int, Any] = {}
        while len(found) < self.world:
            try:
                answered, rank, result, error = self._results.get(timeout=SECONDS)
            except queue.Empty:
                self.stop(kill=True)
                missing = sorted(set(range(self.world)) - set(found))
                raise RankError(f"ranks {missing} did not answer in {SECONDS} s") from None
            if error is not None:
                self.stop(kill=True)
                raise RankError(f"rank {rank}:\n{error}")
            assert answered == number, (answered, number)
            found[rank] = result
        return [found[rank] for rank in range(self.world)]

    def stop(self, kill: bool = False) -> None:
        for process, tasks in zip(self._processes, self._tasks if self._processes else [], strict=True):
            if kill:
                process.kill()
            else:
                tasks.put(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
        self._processes = []
