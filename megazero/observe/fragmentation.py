"""Fragmentation of a GPU's caching allocator: how much memory is free, and how much of that in one block.

The allocator reserves segments of the device and cuts them into blocks. A block that outlives its neighbours splits the
free memory around it, so that no free block may be large enough although their sum is. Against this the ZeRO paper puts
long-lived tensors into an arena of their own (MD, --contiguous-checkpointing).
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

# State of a block in a snapshot. All others are in use, also a freed block that another stream still reads.
FREE = "inactive"


class Fragmentation(NamedTuple):
    """Bytes of a caching allocator at one instant. Free are reserved - allocated, largest_free of them in one block."""

    reserved: int  # taken from the device
    allocated: int  # bytes of blocks in use, each rounded up as the allocator does
    largest_free: int  # a larger request takes more from the device


def fragmentation(segments: Iterable[Mapping[str, Any]]) -> Fragmentation:
    """Measure the segments of one device, as `torch.cuda.memory_snapshot()` lists them."""
    segments = list(segments)
    free = [block["size"] for segment in segments for block in segment["blocks"] if block["state"] == FREE]
    reserved = sum(segment["total_size"] for segment in segments)
    return Fragmentation(reserved, reserved - sum(free), max(free, default=0))


def device_fragmentation(device: torch.device) -> Fragmentation | None:
    """Measure the allocator of a GPU; None on a CPU, which has none. Slow: the snapshot lists every block."""
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return fragmentation(segment for segment in torch.cuda.memory_snapshot() if segment["device"] == index)
