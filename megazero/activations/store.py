"""Activation recompute: full, which keeps each block's input alone, and selective, which makes again what is cheap.

Where a block's kept input lives is three choices that go together in any way: whole, or partitioned over the
tensor-parallel ranks (Pa); on the device, or in host memory (Pa+cpu); in memory of its own, or in an arena (MD).
All of it is a (pack, unpack) pair: torch's non-reentrant checkpoint calls pack once per block and micro-batch in
forward, and unpack when the block's backward begins.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megazero.activations.offload import Copies, Fetch, Stored, StreamCopies
from megazero.comm.collectives import Axis
from megazero.memory.pool import Slot, Slots
from megazero.memory.tracker import Lease, Ledger
from megazero.plan.flat_layout import partition_numel


class Keep(NamedTuple):
    """Of the blocks of one micro-batch, in the order of the forward."""

    pack: Callable[[torch.Tensor], Any]
    unpack: Callable[[Any], torch.Tensor]


class Kept:
    """A packed input. Its lease and its slot end when autograd lets go of it."""

    def __init__(self, shape: torch.Size, data: torch.Tensor, lease: Lease, slot: Slot | None) -> None:
        self.shape, self.data, self.lease, self.slot = shape, data, lease, slot
        # Of those in host memory:
        self.stored: Stored | None = None
        self.fetch: Fetch | None = None
        self.before: Kept | None = None  # of the block whose backward is next


class Checkpoints:
    """Keeps the inputs of a rank's blocks from forward to backward.

    Args:
        numel: elements of an input.
        tp: Pa's ranks: each keeps 1/size of an input that is the same on all of them. None: each rank keeps its own.
        on_host: in host memory.
        contiguous: in an arena, as large as the schedule's micro-batches in flight need.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        ledger: Ledger,
        *,
        tp: Axis | None,
        on_host: bool,
        contiguous: bool,
    ) -> None:
        self.ledger, self.tp = ledger, tp
        self.kind = "host" if on_host else "activation_checkpoints"
        self.each = numel if tp is None else partition_numel(numel, tp.size)
        self.all: weakref.WeakSet[Kept] = weakref.WeakSet()
        self.waiting: deque[list[weakref.ref[Kept]]] = deque()  # the last input of each micro-batch, oldest first
        self.slots: Slots | None = None
        self.copies: Copies | None = None
        if on_host:
            on_gpu = device.type != "cpu"
            host = torch.device("cpu")
            self.slots = Slots(self.each, dtype, host, ledger, idle="host", contiguous=contiguous, pin=on_gpu)
            self.copies = StreamCopies(self.each, dtype, device, ledger) if on_gpu else Copies()
        elif contiguous:
            self.slots = Slots(self.each, dtype, device, ledger, idle="buffers", contiguous=True)

    def begin(self, in_flight: int) -> None:
        """A step begins that keeps at most `in_flight` inputs at once; now there is none.

        What an exception's traceback may still hold of the step before no longer counts.
        """
        if self.copies is not None:
            self.copies.finish()
        for kept in list(self.all):
            kept.lease.end()
        self.waiting.clear()
        if self.slots is not None:
            self.slots.begin(in_flight)

    def keep(self) -> Keep:
        """For one micro-batch."""
        # Weak: autograd may hold on to `pack` for longer than to what it packed.
        packed: list[weakref.ref[Kept]] = []
        self.waiting.append(packed)

        def pack(x: torch.Tensor) -> Kept:
            kept = self._pack(x.detach())
            if kept.stored is not None and packed:
                kept.before = packed[-1]()
            packed[:] = [weakref.ref(kept)]
            self.all.add(kept)
            return kept

        return Keep(pack, self._unpack)

    def fetch_ahead(self) -> None:
        """The oldest micro-batch's backward begins: with the head, while the last block's input comes back."""
        packed = self.waiting.popleft()
        last = packed[0]() if packed else None
        if last is not None:
            self._start_fetch(last)

    def _start_fetch(self, kept: Kept) -> None:
        if self.copies is not None and kept.stored is not None and kept.fetch is None:
            kept.fetch = self.copies.start_fetch(kept.stored)

    def _pack(self, x: torch.Tensor) -> Kept:
        if self.tp is None and self.slots is None:
            return Kept(x.shape, x, self._lease(x), None)
        part = x.reshape(-1)
        if self.tp is not None:
            part = part[self.tp.rank * self.each : (self.tp.rank + 1) * self.each]
        slot = self.slots.take() if self.slots is not None else None
        kept = Kept(x.shape, slot.data if slot is not None else x.new_empty(self.each), self._lease(x), slot)
        if self.copies is not None:
            kept.stored = self.copies.start_store(part, kept.data)
        else:
            kept.data[: part.numel()].copy_(part)
        return kept

    def _lease(self, x: torch.Tensor) -> Lease:
        return self.ledger.lease(self.kind, self.each * x.element_size())

    def _unpack(self, kept: Kept) -> torch.Tensor:
        data = kept.data
        self._start_fetch(kept)
        if kept.fetch is not None:
            data = kept.fetch.wait()
            if kept.before is not None:
                self._start_fetch(kept.before)  # one block ahead
        if self.tp is not None:
            data = self.tp.all_gather(data, data.new_empty(data.numel() * self.tp.size))
        return data.view(-1)[: kept.shape.numel()].view(kept.shape)


def recomputed(fn: Callable[..., torch.Tensor], *args: Any, keep: Keep) -> torch.Tensor:
    """fn(*args), keeping only its tensor arguments, by `keep`, and computing it again in backward."""
    with saved_tensors_hooks(*keep):
        return checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=False)
