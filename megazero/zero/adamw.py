"""AdamW on flat slices, the learning rate, the loss scale, the clip factor. Plain functions and values; the state
belongs to the caller.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.optim.adamw import adamw

from megazero.config.schema import OptimizerConfig

Moments = tuple[torch.Tensor, torch.Tensor]


class StepParams(NamedTuple):
    """Inputs of one optimizer step, the same for every unit."""

    config: OptimizerConfig
    lr: float
    step: torch.Tensor  # number of updates before this one, an fp32 scalar on the device: for the bias correction
    factor: float  # of the gradients: clipping, and 1 / loss scale


def adamw_(params: StepParams, master: torch.Tensor, gradient: torch.Tensor, moments: Moments, decayed: int) -> None:
    """Update `master` and `moments` in place, all [n] in fp32 or fp64; the first `decayed` elements decay."""
    c = params.config
    for part, decay in ((slice(0, decayed), c.weight_decay), (slice(decayed, len(master)), 0.0)):
        if part.start == part.stop:
            continue
        adamw(
            [master[part]],
            [gradient[part]],
            [moments[0][part]],
            [moments[1][part]],
            [],
            [params.step.clone()],  # the kernel counts this update itself
            fused=True,
            amsgrad=False,
            beta1=c.adam_beta1,
            beta2=c.adam_beta2,
            lr=params.lr,
            weight_decay=decay,
            eps=c.adam_eps,
            maximize=False,
        )
