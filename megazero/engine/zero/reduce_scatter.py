"""Reduce-scatter of gradients, overlapped with the backward, in buffers of a constant size (CB)."""

import itertools
from collections.abc import Sequence

import torch

from megazero.engine.memory.pool import BufferPool
from megazero.engine.memory.tracker import MemoryTracker
from megazero.engine.mesh.collectives import Axis, Pending
from megazero.engine.plan.layout.flat_layout import Range
from megazero.engine.plan.layout.zero_policy import Buckets
from megazero.engine.zero.flat_unit import FlatUnit
from megazero.engine.zero.home import Buffer


class Reducer:
    """Reduce-scatters the gradients of one unit after another, bucket by bucket.

    A bucket has a row for each rank, a part of its range, so that each rank receives whole rows of its own
    range. A unit that fits one bucket is sent without packing. A reduction is in flight until the next unit's starts,
    or until `drain`.
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
        self.axis, self.buckets, self.overlap = axis, buckets, overlap
        numel = buckets.packed + axis.scratch_numel(buckets.row)  # to pack into, then scratch
        self.pool = BufferPool(
            numel=numel, dtype=dtype, device=device, tracker=tracker, kind="buffers", count=buckets.slots
        )
        self.pending = [Pending() for _ in range(buckets.slots)]
        self.sending: Buffer | None = None  # a whole gradient buffer in flight, not packed

    def start(self, unsharded: Buffer, out: torch.Tensor, add: bool, unit: FlatUnit) -> None:
        """Write or add this rank's part of the sum of all ranks' `unsharded` [numel] to `out` [owned]."""
        self.drain()
        count = self.buckets.count(unit.ranges)
        for number in range(count):
            rows = self.buckets.rows(unit.ranges, number)
            slot = number % len(self.pool)
            self.pending[slot].wait()
            bucket, scratch = unsharded.data, self.pool[slot][self.buckets.packed :]
            target = out[rows[self.axis.rank].within(unit.owned).slice()]
            if count > 1:
                bucket, rows = _packed(bucket, rows, self.pool[slot], even=not unit.uneven)
            self.pending[slot] = self.axis.start_reduce_scatter(
                bucket, target, add, scratch=scratch, ranges=rows if unit.uneven else ()
            )
        if count > 1:
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


def _packed(
    whole: torch.Tensor, rows: Sequence[Range], space: torch.Tensor, even: bool
) -> tuple[torch.Tensor, list[Range]]:
    """Copy `rows` of `whole` into `space`, one after another. Return the part that they fill, and their places."""
    stops = list(itertools.accumulate(row.numel for row in rows))
    places = [Range(stop - row.numel, stop) for row, stop in zip(rows, stops, strict=True)]
    if even:
        space[: stops[-1]].view(len(rows), -1).copy_(whole.view(len(rows), -1)[:, rows[0].slice()])  # one launch
    else:
        for row, place in zip(rows, places, strict=True):
            if row.numel:
                space[place.slice()] = whole[row.slice()]
    return space[: stops[-1]], places
