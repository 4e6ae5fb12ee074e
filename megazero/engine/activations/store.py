"""Inputs of blocks, kept from forward to recompute.

Three independent choices: whole or partitioned over the tensor-parallel ranks (Pa); on the device or in host memory
(Pa+cpu); separate allocations or one arena (MD). The program determines when an input is kept, fetched and dropped, and
its slot.
"""

from collections import Counter
from dataclasses import dataclass

import torch

from megazero.engine.memory.copies import Copies, DeviceCopy, HostCopy, StreamCopies
from megazero.engine.memory.pool import BufferPool
from megazero.engine.memory.tracker import Allocation, MemoryTracker
from megazero.engine.mesh.collectives import Axis, Pending
from megazero.engine.plan.layout.flat_layout import partition_numel

Key = tuple[str, int]  # layer, micro-batch


@dataclass
class KeptInput:
    """One input, or this rank's part of it."""

    shape: torch.Size
    data: torch.Tensor
    allocation: Allocation
    copy: HostCopy | None = None  # in host memory
    fetch: DeviceCopy | None = None  # in flight to the device
    whole: torch.Tensor | None = None  # rebuilt from its parts


class KeptInputs:
    """Kept inputs of a rank's blocks.

    Args:
        numel: elements of an input, at most.
        tp: Pa: each rank of this axis keeps 1/size of an input that is equal on all of them. None: whole inputs.
        on_host: keep them in host memory.
        contiguous: keep them in an arena.
        sent: the counter of bytes that are copied to and from the host.
        outlive: inputs are used when their slots are free again.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        tracker: MemoryTracker,
        *,
        tp: Axis | None,
        on_host: bool,
        contiguous: bool,
        sent: Counter[str],
        outlive: bool = False,
    ) -> None:
        self.outlive = outlive
        self.tracker, self.tp = tracker, tp
        self.part_numel = numel if tp is None else partition_numel(numel, tp.size)
        # kinds of memory of a kept input and of a free slot
        self.kind, self.free_kind = ("host", "host") if on_host else ("activation_checkpoints", "buffers")
        on_gpu = device.type != "cpu"
        self.copies: Copies | None = None
        if on_host and on_gpu:
            self.copies = StreamCopies(numel=self.part_numel, dtype=dtype, device=device, tracker=tracker, sent=sent)
        elif on_host:
            self.copies = Copies(sent)
        self.slots = BufferPool(
            numel=self.part_numel,
            dtype=dtype,
            device=torch.device("cpu") if on_host else device,
            tracker=tracker,
            kind=self.free_kind,
            contiguous=contiguous,
            pin=on_host and on_gpu,
        )
        self.kept: dict[Key, KeptInput] = {}

    def begin(self, num_slots: int) -> None:
        """Prepare for a program with `num_slots` slots. Drop the inputs of a program that an exception ended."""
        if self.copies is not None:
            self.copies.finish()
        for key in list(self.kept):
            self.drop(key, 0 if len(self.slots) else None)
        self.slots.grow(num_slots)

    def keep(self, key: Key, x: torch.Tensor, slot: int | None) -> None:
        """Keep x, or this rank's part of it; as a copy in `slot` if one is given."""
        part = x.reshape(-1)
        if self.tp is not None:
            part = part[self.tp.rank * self.part_numel : (self.tp.rank + 1) * self.part_numel]
        copy: torch.Tensor | None = None
        if slot is not None:
            copy = self.slots[slot]
            self.tracker.enter(self.free_kind, -self.slots.slot_bytes)
        elif self.tp is not None:
            copy = x.new_empty(self.part_numel)
        kept = KeptInput(x.shape, x if copy is None else copy, self.tracker.allocate(self.kind, self.slots.slot_bytes))
        if copy is not None and self.copies is not None:
            kept.copy = self.copies.start_store(part, copy)
        elif copy is not None:
            copy[: part.numel()].copy_(part)
        self.kept[key] = kept

    def start_fetch(self, key: Key) -> Pending:
        """Start to copy a kept input from host memory to the device."""
        kept = self.kept[key]
        assert self.copies is not None and kept.copy is not None, key
        kept.fetch = self.copies.start_fetch(kept.copy)
        return Pending(then=kept.fetch.wait)

    def rebuild(self, key: Key) -> None:
        """All-gather a partitioned input."""
        assert self.tp is not None, key
        kept = self.kept[key]
        part = kept.data if kept.fetch is None else kept.fetch.data
        kept.whole = self.tp.all_gather(part, part.new_empty(part.numel() * self.tp.size))

    def take(self, key: Key) -> torch.Tensor:
        """Return the input in its shape, and drop the reference to a rebuilt one.

        Weight gradients that are queued read the input of a block without a norm in front, when its slot has another.
        """
        kept = self.kept[key]
        whole, kept.whole = kept.whole, None
        if whole is None:
            whole = kept.data if kept.fetch is None else kept.fetch.data
            whole = whole.clone() if self.outlive else whole
        return whole.view(-1)[: kept.shape.numel()].view(kept.shape)

    def drop(self, key: Key, slot: int | None) -> None:
        """Free a kept input and its slot, if any."""
        self.kept.pop(key).allocation.end()
        if slot is not None:
            self.tracker.enter(self.free_kind, self.slots.slot_bytes)
