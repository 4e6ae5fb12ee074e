"""Fragmentation of a caching allocator: how much memory lies idle, and how much of that in one block. Pure: no torch.

The allocator reserves segments from the device and cuts them into blocks. A block that outlives its neighbours splits
what is free around it: enough bytes may be free in sum, and no block be large enough. That is what the ZeRO paper's
memory defragmentation (MD) is against: what lives long goes into an arena of its own (--contiguous-checkpointing).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

# Of a block in a snapshot. Every other state is in use: by a tensor ("active_allocated"), or freed while another stream
# still reads it ("active_pending_free"; torch's docs call it "active_awaiting_free"). Neither can be handed out.
FREE = "inactive"


class Fragmentation(NamedTuple):
    """A caching allocator at one instant, in bytes.

    0 <= largest_free <= free = reserved - allocated.
    """

    reserved: int  # taken from the device
    allocated: int  # of these, in blocks that are in use, each rounded up as the allocator does
    largest_free: int  # the largest free block: no larger request is served without taking more from the device

    @property
    def free(self) -> int:
        """Bytes that are reserved and not in use."""
        return self.reserved - self.allocated

    @property
    def ratio(self) -> float:
        """The share of the free bytes that lies outside the largest free block: 1 - largest_free / free, in [0, 1).

        0: all that is free is one piece, or nothing is free. Near 1: crumbs. It is the usual measure of external
        fragmentation, chosen for it says what an allocation meets: free bytes x (1 - ratio) is the largest that fits.
        It is an upper bound of the harm: a segment that is free as a whole is a piece of its own here, and yet the
        allocator can return it to the device, and does before it runs out. So look at it where memory is short, and
        at `free` beside it: crumbs of next to nothing are harmless.
        """
        return 1 - self.largest_free / self.free if self.free else 0.0


def fragmentation(segments: Iterable[Mapping[str, Any]]) -> Fragmentation:
    """Measure the segments of one device's snapshot, in the format of `torch.cuda.memory_snapshot()`.

    Of a segment its `total_size` is read and its `blocks`, of a block its `size` and `state`.
    """
    segments = list(segments)
    free = [block["size"] for segment in segments for block in segment["blocks"] if block["state"] == FREE]
    reserved = sum(segment["total_size"] for segment in segments)
    return Fragmentation(reserved, reserved - sum(free), max(free, default=0))


def device_fragmentation(device: torch.device) -> Fragmentation | None:
    """Measure the caching allocator of a GPU now; None on a CPU, which has none.

    The snapshot lists every block, under the allocator's lock: not for every iteration.
    """
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return fragmentation(segment for segment in torch.cuda.memory_snapshot() if segment["device"] == index)
