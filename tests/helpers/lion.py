"""Lion (Chen et al. 2023) as another optimizer: one moment, in bf16, and a step by the sign. No run has it."""

from __future__ import annotations

import torch

from megazero.config.optimizers import State, UpdateRule
from megazero.optim.step import StepParams

RULE = UpdateRule("lion", (State("direction", "bf16"),))


def update(
    params: StepParams, master: torch.Tensor, gradient: torch.Tensor, states: tuple[torch.Tensor, ...], decayed: int
) -> None:
    c, (moment,) = params.config, states
    if params.divisor is not None:
        gradient.div_(params.divisor)
    master[:decayed].mul_(1 - params.lr * c.weight_decay)
    master.sub_(torch.lerp(gradient, moment.to(gradient.dtype), c.adam_beta1).sign_(), alpha=params.lr)
    moment.copy_(torch.lerp(gradient, moment.to(gradient.dtype), c.adam_beta2))
