"""The host memory of a unit whose states are on the host, between the device and the update."""

from __future__ import annotations

import torch

from megazero.memory.copies import HostLink
from megazero.zero.flat_unit import FlatUnit, ZeroOptions


class HostBuffer:
    """Memory of copies to and from the device, pinned on a GPU: first of gradients, then of updated weights.

    gradient  [owned]  in --grad-dtype: summed so far, from the first StoreGradient to the update
    weights   [owned]  in --precision: the same memory, from the update to the end of FetchWeights
    """

    def __init__(self, unit: FlatUnit, options: ZeroOptions, link: HostLink) -> None:
        self.link, numel = link, unit.owned.numel
        dtypes = options.grad_dtype, options.dtype
        num_bytes = numel * max(dtype.itemsize for dtype in dtypes)
        memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=options.mesh.device.type != "cpu")
        self.gradient, self.weights = (memory[: numel * dtype.itemsize].view(dtype) for dtype in dtypes)
        self.allocation = options.tracker.allocate("host", num_bytes)
