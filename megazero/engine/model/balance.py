"""The choices of a micro-batch's routers, and the numbers with which balance losses enter the objective.

Shapes: b micro-batch, T tokens of this rank, k experts of a token, E experts.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from megazero.engine.memory.tracker import Allocation, MemoryTracker
from megazero.engine.model.dispatch import Dispatch


class Choices(NamedTuple):
    """The experts that tokens pass.

    Attributes:
        ids: [T, k] int16; E more than the expert's number if it has no room for the choice, which is dropped.
        counts: choices of each expert in each whole sample, [b, E]; None: there is no loss that needs them.
        dispatch: the way of their rows to the experts.
    """

    ids: torch.Tensor
    counts: torch.Tensor | None
    dispatch: Dispatch


@dataclass(frozen=True)
class Balance:
    """A micro-batch of a training step.

    Attributes:
        targets: of each whole sample, [b] fp64.
        seed: d objective / d loss, a scalar in fp64; see `Interpreter.run`.
    """

    targets: torch.Tensor
    seed: torch.Tensor
    _kept: dict[int, tuple[Choices, Allocation]] = field(default_factory=dict)

    def keep(self, layer: int, choices: Choices, tracker: MemoryTracker) -> None:
        """Keep the choices of a layer's Forward, so that its Recompute makes the same."""
        parts = choices.ids, choices.counts, choices.dispatch.table
        num_bytes = sum(part.nbytes for part in parts if part is not None)
        self._kept[layer] = choices, tracker.allocate("activation_checkpoints", num_bytes)

    def take(self, layer: int) -> Choices | None:
        """Return kept choices, once."""
        choices, _ = self._kept.pop(layer, (None, None))
        return choices
