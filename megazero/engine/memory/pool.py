"""Buffers of equal size that are allocated once and reused."""

from typing import Any

import torch

from megazero.engine.memory.tracker import MemoryTracker


class BufferPool:
    """Buffers of `numel` elements each, found by their slot number.

    A pool only holds memory; its user, or the program, chooses the slots.

    Args:
        kind: of memory, for the tracker.
        contiguous: one allocation for all, an arena, to avoid fragmentation.
        pin: page-locked host memory, for asynchronous copies of a GPU.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        tracker: MemoryTracker,
        kind: str,
        *,
        count: int = 0,
        contiguous: bool = False,
        pin: bool = False,
    ) -> None:
        self.numel, self.dtype, self.device, self.kind = numel, dtype, device, kind
        self.contiguous, self.pin, self.tracker = contiguous, pin, tracker
        self.slot_bytes = numel * dtype.itemsize
        self.slots: list[torch.Tensor] = []
        self._allocation = tracker.allocate(kind, 0)
        self.grow(count)

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, slot: int) -> torch.Tensor:
        return self.slots[slot]

    def grow(self, count: int) -> None:
        """Make at least `count` slots. Growing reallocates all of them, and loses their contents."""
        if len(self.slots) >= count:
            return
        self.slots.clear()  # free the old slots before allocating the new ones
        self._allocation.end()
        options: dict[str, Any] = {"dtype": self.dtype, "device": self.device, "pin_memory": self.pin}
        if self.contiguous:
            self.slots = list(torch.empty(count, self.numel, **options))
        else:
            self.slots = [torch.empty(self.numel, **options) for _ in range(count)]
        self._allocation = self.tracker.allocate(self.kind, count * self.slot_bytes)
