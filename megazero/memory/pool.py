"""Equal buffers that are used again and again, for what outlives the block that makes it.

Allocated beforehand in one piece they are the arena of ZeRO-R's MD: long-lived checkpoints then lie side by side, and
not between the short-lived activations of the blocks, where they would fragment the allocator's memory.
"""

from __future__ import annotations

import torch

from megazero.memory.tracker import Ledger


class Slot:
    """A buffer in use. It goes back when it is ended, or when nobody holds it any more."""

    __slots__ = ("_age", "_home", "data")

    def __init__(self, home: Slots, data: torch.Tensor) -> None:
        self.data = data
        self._home: Slots | None = home
        self._age = home.age

    def end(self) -> None:
        if self._home is not None:
            self._home.give(self.data, self._age)
            self._home = None

    def __del__(self) -> None:
        self.end()


class Slots:
    """Slots of `numel` elements each.

    Args:
        idle: the kind of memory that slots not in use are entered as; those in use are their users' to enter.
        contiguous: all in one allocation, made by `begin`; else one by one, when first needed.
        pin: page-locked host memory, which a GPU copies to and from without waiting.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        ledger: Ledger,
        *,
        idle: str,
        contiguous: bool,
        pin: bool = False,
    ) -> None:
        self.numel, self.dtype, self.device, self.pin = numel, dtype, device, pin
        self.each_bytes = numel * dtype.itemsize
        self.ledger, self.idle, self.contiguous = ledger, idle, contiguous
        self.buffers: list[torch.Tensor] = []
        self.free: list[torch.Tensor] = []
        self.age = 0

    def begin(self, count: int) -> None:
        """All slots are free, and at least `count` of a contiguous arena are there.

        Free even if the step before ended in an exception whose traceback still holds some: those do not come back.
        """
        self.age += 1
        self._set_free(list(self.buffers))
        if self.contiguous and len(self.buffers) < count:
            self._set_free([])
            self.buffers.clear()  # the old arena goes before the new one comes
            self.buffers = list(self._allocate(count))
            self._set_free(list(self.buffers))

    def take(self) -> Slot:
        if not self.free:
            assert not self.contiguous, f"all {len(self.buffers)} slots are in use: the schedule said that they suffice"
            self.buffers.append(self._allocate(1)[0])
            self._set_free([self.buffers[-1]])
        data = self.free.pop()
        self.ledger.enter(self.idle, -self.each_bytes)
        return Slot(self, data)

    def give(self, data: torch.Tensor, age: int) -> None:
        if age == self.age:
            self.free.append(data)
            self.ledger.enter(self.idle, self.each_bytes)

    def _set_free(self, free: list[torch.Tensor]) -> None:
        self.ledger.enter(self.idle, self.each_bytes * (len(free) - len(self.free)))
        self.free = free

    def _allocate(self, count: int) -> torch.Tensor:
        return torch.empty(count, self.numel, dtype=self.dtype, device=self.device, pin_memory=self.pin)
