"""The host memory of a unit whose states are on the host, between the device and the update."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megazero.comm.mesh.collectives import Pending
from megazero.memory.copies import DeviceCopy, HostLink
from megazero.zero.flat_unit import FlatUnit, ZeroOptions

Norms = Callable[[torch.Tensor], Sequence[float]]  # of the pieces of a gradient [owned] that this rank counts


class HostBuffer:
    """Memory of copies to and from the device, pinned on a GPU: first of gradients, then of updated weights.

    gradient  [owned]  in --grad-dtype: summed so far, from the first StoreGradient to the update
    weights   [owned]  in --precision: the same memory, from the update to the end of FetchWeights
    """

    def __init__(
        self, unit: FlatUnit, options: ZeroOptions, link: HostLink, memory: torch.Tensor | None = None
    ) -> None:
        """memory: uint8 [OwnedSizes.buffer or more], tracked elsewhere; None: allocate it."""
        self.link, numel = link, unit.owned.numel
        if memory is None:
            num_bytes = unit.sizes(options).buffer
            memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=options.mesh.device.type != "cpu")
            self.allocation = options.tracker.allocate("host", num_bytes)
        dtypes = options.grad_dtype, options.dtype
        self.gradient, self.weights = (memory[: numel * dtype.itemsize].view(dtype) for dtype in dtypes)

    def start_store(self, source: torch.Tensor, norms: Norms) -> DeviceCopy:
        """Start to copy the reduced gradient, [owned], from the device."""
        return self.link.start_store(source, self.gradient)

    def start_fetch(self, out: torch.Tensor) -> Pending:
        """Start to copy the gradient to the device."""
        return Pending(then=self.link.start_fetch(self.gradient, out).wait)

    def start_fetch_weights(self, out: torch.Tensor) -> Pending:
        """Start to copy the updated weights to the device."""
        return Pending(then=self.link.start_fetch(self.weights, out).wait)

    def stored(self) -> torch.Tensor:
        """Return the gradient that was stored last, complete after `HostLink.finish_stores`."""
        return self.gradient

    def known_norms(self) -> Sequence[float] | None:
        """Return the norms of the stored gradient's pieces, if its memory has another use already."""
        return None

    def flush(self) -> None:
        """Write changes of the states at rest, before they are read in another way."""

    def settle(self) -> None:
        """Wait until the memory may be overwritten. A unit's own memory has one use at a time."""
