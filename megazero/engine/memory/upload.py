"""Asynchronous copies from the host to the device."""

import math
from collections.abc import Sequence

import torch

ALIGN = 16  # bytes: a part may be read as any dtype


def upload(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return host tensors on `device`, copied at once from page-locked memory.

    A copy from other memory blocks the process. torch keeps the page-locked buffer until the copy is done, and reuses
    it. On a CPU the tensors are returned as they are.
    """
    if device.type == "cpu":
        return list(tensors)
    starts, total = [], 0
    for x in tensors:
        starts.append(total)
        total += math.ceil(x.nbytes / ALIGN) * ALIGN
    packed = torch.empty(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for x, start in zip(tensors, starts, strict=True):
        _part(packed, start, x).copy_(x)
    packed = packed.to(device, non_blocking=True)
    return [_part(packed, start, x) for x, start in zip(tensors, starts, strict=True)]


def _part(packed: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    return packed[start : start + like.nbytes].view(like.dtype).view(like.shape)
