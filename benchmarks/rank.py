"""One rank of one system and its commands. It imports nothing that DeepSpeed's environment lacks."""

import functools
import gc
import importlib
import json
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.peers import Training, Work
from tests.helpers.resident import forget_peak, resident


class Rank:
    """A rank of a system; every method is a command. Steps are numbered from 0, and set the data."""

    def __init__(self, make: Callable[[Work, torch.device], Training], work: Work, rank: int) -> None:
        self.make, self.work, self.rank = make, work, rank
        self.device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
        self.at = 0
        self.training: Training | None = None

    def build(self) -> dict[str, Any]:
        self.training, self.at = self.make(self.work, self.device), 0
        return {}

    def _steps(self, count: int) -> list[float]:
        assert self.training is not None, "not built"
        losses = []
        for i in range(self.at, self.at + count):
            losses.append(self.training.step(*self.work.inputs(i, self.rank, self.device)))
        self.training.wait_for_all()
        self.at += count
        return losses

    def losses(self, count: int) -> dict[str, Any]:
        """The mean over ranks of `count` steps' losses."""
        mean = torch.tensor(self._steps(count), dtype=torch.float64, device=self.device)
        dist.all_reduce(mean)
        return {"losses": (mean / self.work.ranks).tolist()}

    def check(self) -> dict[str, Any]:
        """Return the distance of this rank's results from the expected ones, by kind."""
        assert self.training is not None and self.training.check is not None, "nothing to check"
        return self.training.check()

    def timed(self, count: int) -> dict[str, Any]:
        """Return seconds per step, and CPU seconds of all threads of this process, communication's included."""
        self._together()
        start, computed = time.perf_counter(), time.process_time()
        self._steps(count)
        computed = time.process_time() - computed
        self._together()
        return {"seconds": (time.perf_counter() - start) / count, "cpu": computed / count}

    def _together(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    def memory(self, count: int) -> dict[str, Any]:
        """Peaks over `count` steps after two, in bytes: `step`; over building and all steps: `ever`.

        On a CPU: resident memory beyond that after training and dropping a tiny model, so that libraries loaded late
        do not count. `process`: with them.
        """
        if self.device.type == "cuda":
            self.build()
            self._steps(2)
            ever = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self._steps(count)
            step = torch.cuda.max_memory_allocated()
            return {"step": step, "ever": max(step, ever), "process": max(step, ever)}
        whole = self.work
        self.work = replace(whole, num_layers=1, hidden_size=64, num_heads=1, vocab_size=128)
        self.build()
        self._steps(2)
        self.training, self.work = None, whole
        gc.collect()
        base = resident("VmRSS")
        forget_peak()
        self.build()
        self._steps(2)
        ever = resident("VmHWM")
        forget_peak()
        self._steps(count)
        step = resident("VmHWM")
        return {"step": step - base, "ever": max(step, ever) - base, "process": max(step, ever)}


@functools.cache
def served(rank: int, module: str, system: str, work: str) -> Rank:
    """Create this process's rank of a system, once."""
    warnings.filterwarnings("ignore")
    systems = importlib.import_module(module)
    return Rank(systems.SYSTEMS[system].make, systems.Work(**json.loads(work)), rank)


def obey(rank: int, made_of: tuple[str, str, str], name: str, *arguments: Any) -> dict[str, Any]:
    """Execute a command on this process's rank. made_of: module, system, work."""
    return getattr(served(rank, *made_of), name)(*arguments)
