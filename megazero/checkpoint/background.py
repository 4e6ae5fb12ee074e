"""A save in a thread: training stops only for the copy to host memory.

The buffers of the copies are allocated once and reused by every save. If the shards are on a GPU, they are pinned. The
thread then calls `save` with a group of its own, so that its collectives never mix with those of training.
"""

import dataclasses
import datetime
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megazero.checkpoint.messages import Group
from megazero.checkpoint.shards import LocalShard
from megazero.engine.memory.tracker import Allocation, MemoryTracker

# A rank waits at least this long for the slowest rank's write.
LEAST_TIMEOUT_MINUTES = 60.0


def slow_group(timeout_minutes: float) -> Group:
    """Make a group of all ranks whose waits outlast the slowest rank's write. All ranks call it together."""
    timeout = datetime.timedelta(minutes=max(timeout_minutes, LEAST_TIMEOUT_MINUTES))
    return dist.new_group(backend="gloo", timeout=timeout) if dist.is_initialized() else None


class BackgroundSaver:
    """Runs one save at a time. All ranks create it together, and call `start` and `finish` in the same order."""

    def __init__(self, timeout_minutes: float, save: Callable[..., Path], tracker: MemoryTracker | None = None) -> None:
        """`save`: a store's; `tracker`: counts the buffers as host memory."""
        self._group, self._save, self._tracker = slow_group(timeout_minutes), save, tracker
        self._thread = ThreadPoolExecutor(1, "save")
        self._buffers: dict[str, torch.Tensor] = {}
        self._counted: list[Allocation] = []
        self._running: Future[Path] | None = None

    @property
    def idle(self) -> bool:
        """This rank has no save in flight; the next call of `finish` does not wait."""
        return self._running is None or self._running.done()

    @property
    def num_bytes(self) -> int:
        """Host memory of the copies."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def start(self, iteration: int, shards: Mapping[str, LocalShard], state: dict[str, Any]) -> None:
        """Copy the shards, which may change once this returns, and start to write them. Call `finish` first."""
        assert self._running is None, "finish the last save first"
        copies = {
            name: dataclasses.replace(shard, data=self._copied(name, shard.data)) for name, shard in shards.items()
        }
        if any(shard.data.is_cuda for shard in shards.values()):
            torch.cuda.synchronize()
        self._running = self._thread.submit(self._save, iteration, copies, state, self._group)

    def _copied(self, name: str, data: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != data.shape:
            buffer = torch.empty(data.shape, dtype=data.dtype, pin_memory=data.is_cuda)
            self._buffers[name] = buffer
            if self._tracker is not None:
                self._counted.append(self._tracker.allocate("host", buffer.nbytes))
        return buffer.copy_(data.detach(), non_blocking=True)

    def finish(self) -> Path | None:
        """Wait for the save that was started, if any, and return its folder. Raises as `save`, on every rank."""
        running, self._running = self._running, None
        return running.result() if running is not None else None
