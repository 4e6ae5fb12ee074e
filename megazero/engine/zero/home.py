"""The home of a unit: the place of its master weights, its optimizer states and, for the update, its reduced gradient.

A unit's home is chosen when the unit is built: the device (`Home`), or host memory or a file (`off_device`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from megazero.engine.memory.tracker import Allocation
from megazero.engine.mesh.collectives import Pending

Pieces = Callable[[torch.Tensor], list[torch.Tensor]]  # the parts of a gradient [owned] that this rank adds to the norm


class Reduced(Protocol):
    """A reduced gradient, [owned], wherever it is."""

    def read(self) -> torch.Tensor:
        """Return the numbers, on the device or in host memory."""

    def counted(self, pieces: Pieces) -> Sequence[torch.Tensor | float]:
        """Return the gradient's `pieces`, or their norms if they are known."""

    def take(self) -> Buffer:
        """Hand over the memory; the caller ends its allocation."""

    def free(self) -> None:
        """Discard the gradient."""


class Buffer(NamedTuple):
    """A tensor and its entry in the tracker; as a reduced gradient, one on the device."""

    data: torch.Tensor
    allocation: Allocation

    def read(self) -> torch.Tensor:
        return self.data

    def counted(self, pieces: Pieces) -> Sequence[torch.Tensor | float]:
        return pieces(self.data)

    def take(self) -> Buffer:
        return self

    def free(self) -> None:
        self.allocation.end()


class Home:
    """The device. Compute weights and gradients are at home, so nothing is copied.

    Attributes:
        kind, scratch_kind: memory of the states, and of an update's temporary tensors.
        states: where the states are during an update, and between steps; None: memory of their own.
    """

    kind, scratch_kind = "optimizer", "buffers"
    states: tuple[torch.Tensor | None, torch.Tensor | None] = None, None
    on_device = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def compute_weights(self, weights: torch.Tensor) -> torch.Tensor:
        """Return the tensor [owned] to which an update casts: the `weights` of the device, or memory for a copy."""
        return weights

    def release(self) -> None:
        """Wait until the device has read all that `compute_weights` has returned."""

    def start_fetch_weights(self, out: torch.Tensor) -> Pending:
        """Copy the updated weights to the device."""
        return Pending()

    def start_store(self, gradient: Buffer, pieces: Pieces) -> tuple[Reduced, Pending]:
        """Copy a reduced gradient from the device, and free it there."""
        raise AssertionError("the gradient is at home")

    def start_fetch(self, out: torch.Tensor) -> Pending:
        """Copy the stored gradient to the device."""
        raise AssertionError("the gradient is at home")

    def start_read(self) -> Pending:
        """Read the states for an update."""
        raise AssertionError("the states are in memory")

    def start_write(self) -> Pending:
        """Write the states after an update."""
        raise AssertionError("the states are in memory")

    def flush(self) -> None:
        """Write changes of the states at rest, before they are read in another way."""
