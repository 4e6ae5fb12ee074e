"""AdamW on flat slices. Plain functions and values; the state belongs to the caller.

Note [torch's fused AdamW]: the kernel divides the gradient as it reads it, so that clipping and the loss scale need no
pass of their own. `torch.optim.adamw.adamw` sorts its tensors by device and dtype before each call: 0.1 ms of the host
for a kernel of 0.01 (docs/log.md). So the operator below it, which is private to torch, is called where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.optim.adamw import adamw

from megazero.config.schema import OptimizerConfig

Moments = tuple[torch.Tensor, torch.Tensor]

OPERATOR = getattr(torch, "_fused_adamw_", None)


class StepParams(NamedTuple):
    """Inputs of one optimizer step, the same for every unit.

    Attributes:
        step: number of this update, from 1: for the bias correction. An fp32 scalar on the device.
        divisor: of the gradients: the loss scale, over the factor of clipping. A scalar on the device in the dtype of
            the master weights; None: 1.
    """

    config: OptimizerConfig
    lr: float
    step: torch.Tensor
    divisor: torch.Tensor | None = None


def adamw_(
    params: StepParams,
    master: torch.Tensor,
    gradient: torch.Tensor,
    moments: Moments,
    decayed: int,
    operator: Callable[..., object] | None = OPERATOR,
) -> None:
    """Update `master` and `moments` in place, all [n] in fp32 or fp64; the first `decayed` elements decay.

    `gradient` is divided in place.

    Args:
        operator: torch's own, or None: the public function.
    """
    c, divisor = params.config, params.divisor
    if divisor is not None and divisor.dtype != torch.float32:  # the kernel reads fp32
        gradient.div_(divisor)
        divisor = None
    for part, decay in ((slice(0, decayed), c.weight_decay), (slice(decayed, len(master)), 0.0)):
        if part.start == part.stop:
            continue
        tensors = [master[part]], [gradient[part]], [moments[0][part]], [moments[1][part]], []
        options = {
            "amsgrad": False,
            "beta1": c.adam_beta1,
            "beta2": c.adam_beta2,
            "lr": params.lr,
            "weight_decay": decay,
            "eps": c.adam_eps,
            "maximize": False,
            "grad_scale": divisor,
            "found_inf": None,
        }
        if operator is not None:
            operator(*tensors, [params.step], **options)
        else:
            adamw(*tensors, [params.step - 1], fused=True, **options)  # it counts this update itself
