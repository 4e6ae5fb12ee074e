"""Host memory as the home of a unit (--optimizer-cpu-offload)."""

from collections.abc import Sequence

import torch

from megazero.engine.memory.copies import DeviceCopy, HostLink
from megazero.engine.mesh.collectives import Pending
from megazero.engine.zero.flat_unit import FlatUnit, ZeroOptions
from megazero.engine.zero.home import Buffer, Home, Pieces, Reduced


class HostBuffer(Home):
    """Memory of copies to and from the device, pinned on a GPU: first of gradients, then of updated weights.

    As a `Reduced`, it is the gradient that was stored last.

    gradient  [owned]  in --grad-dtype: summed so far, from the first StoreGradient to the update
    weights   [owned]  in --precision: the same memory, from the update to the end of FetchWeights
    """

    kind, scratch_kind, on_device = "host", "host", False

    def __init__(
        self, unit: FlatUnit, options: ZeroOptions, link: HostLink, memory: torch.Tensor | None = None
    ) -> None:
        """memory: uint8 [OwnedSizes.buffer or more], tracked elsewhere; None: allocate it."""
        super().__init__(torch.device("cpu"))
        self.link, self.tracker, numel = link, options.tracker, unit.owned.numel
        if memory is None:
            num_bytes = unit.sizes(options).buffer
            memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=options.mesh.device.type != "cpu")
            self.allocation = options.tracker.allocate("host", num_bytes)
        dtypes = options.grad_dtype, options.dtype
        self.gradient, self.weights = (memory[: numel * dtype.itemsize].view(dtype) for dtype in dtypes)

    def compute_weights(self, weights: torch.Tensor) -> torch.Tensor:
        return self.weights

    def release(self) -> None:
        self.link.finish_fetches()

    def start_store(self, gradient: Buffer, pieces: Pieces) -> tuple[Reduced, Pending]:
        copy = self.copy_gradient(gradient.data, pieces)

        def stored() -> None:
            copy.wait()
            gradient.free()

        return self, Pending(held=(gradient.data,), then=stored)

    def copy_gradient(self, source: torch.Tensor, pieces: Pieces) -> DeviceCopy:
        """Start to copy a reduced gradient, [owned], from the device."""
        return self.link.start_store(source, self.gradient)

    def start_fetch(self, out: torch.Tensor) -> Pending:
        return Pending(then=self.link.start_fetch(self.gradient, out).wait)

    def start_fetch_weights(self, out: torch.Tensor) -> Pending:
        return Pending(then=self.link.start_fetch(self.weights, out).wait)

    def read(self) -> torch.Tensor:
        """Return the stored gradient, complete after `HostLink.finish_stores`."""
        return self.gradient

    def counted(self, pieces: Pieces) -> Sequence[torch.Tensor | float]:
        """Return the pieces of the stored gradient, or their norms if its memory has another use already."""
        self.link.finish_stores()
        return pieces(self.gradient)

    def take(self) -> Buffer:
        return Buffer(self.gradient, self.tracker.allocate("host", 0))  # tracked since it was made

    def free(self) -> None:
        """Discard the gradient; its memory stays."""
