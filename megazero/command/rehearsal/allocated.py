"""Count the bytes of all tensors, by watching every operation."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megazero.torch_private import TorchDispatchMode, storage_id, tree_leaves


class Allocated(TorchDispatchMode):
    """Counts, while it is active, the storages that operations allocate, until they are freed.

    Besides the allocations of the memory tracker, these are autograd's saved tensors and temporary results. Scratch
    memory within a kernel is not seen, nor the rounding and caching of an allocator.

    Attributes:
        now: bytes on the device.
        peak: the most so far; `peak_at` is the result of `place` at that time.
        host_now, host_peak: the same for host memory, if the device is another.
    """

    def __init__(self, device: torch.device, place: Callable[[], object] = lambda: None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.place = device, place
        self.now = self.peak = self.host_now = self.host_peak = 0
        self.peak_at: object = None
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def begin(self) -> None:
        """Reset the peaks: at the start of a step."""
        self.peak, self.peak_at, self.host_peak = self.now, self.place(), self.host_now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.add(x)
        return out

    def add(self, x: torch.Tensor) -> None:
        """Count the memory of a tensor, if it is not counted already."""
        storage = x.untyped_storage()
        key, num_bytes, on_host = storage_id(x), storage.nbytes(), x.device.type != self.device.type
        if key in self._alive:
            return

        def gone(_: object) -> None:
            del self._alive[key]
            self._count(-num_bytes, on_host)

        self._alive[key] = weakref.ref(storage, gone), num_bytes
        self._count(num_bytes, on_host)

    def sizes(self, but: Sequence[torch.Tensor] = ()) -> list[int]:
        """Return the bytes of each storage that is alive, on any device, except those of `but`."""
        left_out = {storage_id(t) for t in but}
        return [num_bytes for key, (_, num_bytes) in self._alive.items() if key not in left_out]

    def _count(self, num_bytes: int, on_host: bool) -> None:
        if on_host:
            self.host_now += num_bytes
            self.host_peak = max(self.host_peak, self.host_now)
            return
        self.now += num_bytes
        if self.now > self.peak:
            self.peak, self.peak_at = self.now, self.place()
