"""The interface of an optimizer's update: a function on flat slices, without state of its own."""

from typing import NamedTuple, Protocol

import torch

from megazero.engine.options.schema import OptimizerConfig


class StepParams(NamedTuple):
    """Inputs of one optimizer step, the same for every unit.

    Attributes:
        step: number of this update, from 1, for the bias correction. An fp32 scalar on the states' device.
        divisor: divides the gradients: loss scale / clipping factor. A scalar in the master weights' dtype; None: 1.
        number: `step` as the host knows it.
        average: weight of the updated weights in their running average; 0: the average stays as it is.
    """

    config: OptimizerConfig
    lr: float
    step: torch.Tensor
    divisor: torch.Tensor | None = None
    number: int = 0
    average: float = 0.0


class UpdateFunction(Protocol):
    def __call__(
        self,
        params: StepParams,
        master: torch.Tensor,
        gradient: torch.Tensor,
        states: tuple[torch.Tensor, ...],
        decayed: int,
    ) -> None:
        """Update `master` and `states` in place, all [n]; the first `decayed` elements decay. Overwrites `gradient`.

        Args:
            states: in the order of the rule's states.
        """
