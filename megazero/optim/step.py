"""The update of an optimizer: a plain function on flat slices, whose state belongs to the caller."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from megazero.config.schema import OptimizerConfig


class StepParams(NamedTuple):
    """Inputs of one optimizer step, the same for every unit.

    Attributes:
        step: number of this update, from 1: for the bias correction. An fp32 scalar where the states are.
        divisor: of the gradients: the loss scale, over the factor of clipping. A scalar in the dtype of the master
            weights; None: 1.
    """

    config: OptimizerConfig
    lr: float
    step: torch.Tensor
    divisor: torch.Tensor | None = None


class Update(Protocol):
    def __call__(
        self,
        params: StepParams,
        master: torch.Tensor,
        gradient: torch.Tensor,
        states: tuple[torch.Tensor, ...],
        decayed: int,
    ) -> None:
        """Update `master` and `states` in place, all [n]; the first `decayed` elements decay. `gradient` is used up.

        Args:
            states: in the order of the rule's.
        """
