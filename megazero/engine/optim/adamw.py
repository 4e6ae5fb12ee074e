"""AdamW on flat slices.

Note [torch's fused AdamW]: the kernel divides the gradient as it reads it, so that clipping and the loss scale need no
extra pass. `torch.optim.adamw.adamw` sorts its tensors by device and dtype before each call, which takes the host 0.1
ms for a kernel of 0.01 ms. So the private operator below it is called, if torch has it.
"""

from collections.abc import Callable

import torch
from torch.optim.adamw import adamw

from megazero.engine.optim.step import StepParams

OPERATOR = getattr(torch, "_fused_adamw_", None)


def update(
    params: StepParams,
    master: torch.Tensor,
    gradient: torch.Tensor,
    states: tuple[torch.Tensor, ...],
    decayed: int,
    operator: Callable[..., object] | None = OPERATOR,
) -> None:
    """Update `master` and the two moments `states` in place, all [n] in fp32 or fp64; see `optim.step.UpdateFunction`.

    Args:
        operator: torch's private operator; None: the public function.
    """
    c, divisor = params.config, params.divisor
    if divisor is not None and divisor.dtype != torch.float32:  # the kernel reads fp32
        gradient.div_(divisor)
        divisor = None
    for part, decay in ((slice(0, decayed), c.weight_decay), (slice(decayed, len(master)), 0.0)):
        if part.start == part.stop:
            continue
        tensors = [master[part]], [gradient[part]], [states[0][part]], [states[1][part]], []
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
            adamw(*tensors, [params.step - 1], fused=True, **options)  # the function adds 1
