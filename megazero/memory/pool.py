"""`BufferPool`: buffers of equal size that are allocated once and reused."""

from __future__ import annotations

import torch

from megazero.memory.tracker import MemoryTracker


class BufferPool:
    """Buffers of `numel` elements each, found by their slot number.

    A pool only holds memory. Which slot is used when is its user's to say, or the program's.

    Args:
        kind: the kind of memory that the tracker counts them as.
        contiguous: all in one allocation, an arena, so that they do not fragment the allocator's memory.
        pin: page-locked host memory, which a GPU copies to and from without waiting.
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
        """Have at least `count` slots. If there are fewer, all are made anew, and their contents are lost."""
        if len(self.slots) >= count:
            return
        self.slots.clear()  # the old ones go before the new ones come
        self._allocation.end()
        options = {"dtype": self.dtype, "device": self.device, "pin_memory": self.pin}
        if self.contiguous:
            self.slots = list(torch.empty(count, self.numel, **options))
        else:
            self.slots = [torch.empty(self.numel, **options) for _ in range(count)]
        self._allocation = self.tracker.allocate(self.kind, count * self.slot_bytes)
