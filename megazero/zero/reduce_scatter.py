"""Reduce-scatter of gradients, overlapped with the backward, in buffers of a constant size (CB)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megazero.comm.mesh.collectives import Axis, Pending
from megazero.memory.pool import BufferPool
from megazero.memory.tracker import Allocation, MemoryTracker
from megazero.plan.layout.zero_policy import Buckets


class Buffer(NamedTuple):
    """A tensor and its entry in the tracker."""

    data: torch.Tensor
    allocation: Allocation


class Reducer:
    """Reduce-scatters the gradients of one unit after another, bucket by bucket.

    Bucket k [shards, columns] has the k-th `columns` elements of every rank's range, so that each rank receives whole
    rows of its own range. A unit that fits one bucket is sent without packing. A reduction is in flight until the next
    unit's starts, or until `drain`.
    """

    def __init__(
        self,
        axis: Axis,
        buckets: Buckets,
        dtype: torch.dtype,
        device: torch.device,
        tracker: MemoryTracker,
        overlap: bool,
    ) -> None:
        self.axis, self.columns, self.overlap = axis, buckets.columns, overlap
        # of a bucket: [shards * columns] to pack into, if units are larger than a bucket, then scratch
        self.packed = buckets.columns * axis.size if buckets.packs else 0
        numel = self.packed + axis.scratch_numel(buckets.columns)
        self.pool = BufferPool(numel, dtype, device, tracker, "buffers", count=buckets.slots)
        self.pending = [Pending() for _ in range(buckets.slots)]
        self.sending: Buffer | None = None  # a whole gradient buffer in flight, not packed

    def start(self, unsharded: Buffer, out: torch.Tensor, add: bool) -> None:
        """Write or add this rank's part of the sum of all ranks' `unsharded` [shards * n] to `out` [n]."""
        self.drain()
        n, packs = out.numel(), out.numel() > self.columns
        rows = unsharded.data.view(self.axis.size, n)
        for k, at in enumerate(range(0, n, self.columns)):
            stop = min(at + self.columns, n)
            slot = k % len(self.pool)
            self.pending[slot].wait()
            bucket, scratch = unsharded.data, self.pool[slot][self.packed :]
            if packs:
                bucket = self.pool[slot][: self.axis.size * (stop - at)]
                bucket.view(self.axis.size, -1).copy_(rows[:, at:stop])
            self.pending[slot] = self.axis.start_reduce_scatter(bucket, out[at:stop], add, scratch)
        if packs:
            unsharded.allocation.end()
        else:
            self.sending = unsharded
        if not self.overlap:
            self.drain()

    def drain(self) -> None:
        """Wait for the reductions in flight."""
        for pending in self.pending:
            pending.wait()
        if self.sending is not None:
            self.sending.allocation.end()
            self.sending = None
