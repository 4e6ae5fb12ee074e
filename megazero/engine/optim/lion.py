"""Lion (Chen et al. 2023) on flat slices: one moment, and steps by the sign of its mean with the gradient."""

import torch

from megazero.engine.optim.step import StepParams


def update(
    params: StepParams, master: torch.Tensor, gradient: torch.Tensor, states: tuple[torch.Tensor, ...], decayed: int
) -> None:
    """Update `master` and the moment `states` in place, all [n]; see `engine.optim.step.UpdateFunction`."""
    c, (moment,) = params.config, states
    if params.divisor is not None:
        gradient.div_(params.divisor)
    master[:decayed].mul_(1 - params.lr * c.weight_decay)
    master.sub_(torch.lerp(gradient, moment, c.adam_beta1).sign_(), alpha=params.lr)
    moment.lerp_(gradient, 1 - c.adam_beta2)
