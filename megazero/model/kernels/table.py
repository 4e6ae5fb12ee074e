"""The two implementations of every fused kernel. A CPU runs torch's operators, which also test Triton's."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from megazero.model.kernels import dropout, eager, operators
from megazero.model.kernels.fused_ops import Activation


class LossKernels(NamedTuple):
    """Softmax cross-entropy over a rank's logits [T, v/tp], in fp32 (fp64 of fp64), which are overwritten.

    Labels [T] are column numbers; those outside [0, num_columns) are other ranks'. Columns from num_columns on are
    padding.
    """

    # (logits, labels, num_columns) -> maxima [T], finite if the logits are; [2, T]: sums of exp(logit - maximum), and
    # the labels' logits, 0 where foreign
    sums: Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
    # (exp(maximum here - over tp), sum over tp, log of the sum of exp(logit) over tp) -> [T], kept for the gradient
    kept: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    # (logits as `sums` left them, labels, num_columns, kept, scale [T]) -> (softmax - one hot) * scale, in place
    grad_: Callable[[torch.Tensor, torch.Tensor, int, torch.Tensor, torch.Tensor], torch.Tensor]


class Kernels(NamedTuple):
    """Passes over memory that are one kernel each, if Triton makes them."""

    dropout: dropout.Kernel
    loss: LossKernels
    # (x [.., h], weight, eps) -> y, 1 / rms(x) [.., 1] in fp32, or fp64 of fp64
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
    # (dy, x, weight, 1 / rms, None or another gradient of x, which is added) -> dx, dweight
    rms_norm_grad: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    # (dy, x, weight, bias, mean, 1 / deviation, None or another gradient of x) -> dx, dweight, dbias
    layer_norm_grad: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    gelu: Activation | None  # None: that of `FusedOps`, which may be compiled; swiglu too
    swiglu: Activation | None
    # (q, k, v; as many results; tables; positions [b, s], None: 0 to s - 1; back): rotates q and k, copies v. All are
    # [b, s, heads, d]; back: by the negative angle
    rotary: Callable[..., None]
    # (table [v, h], rows [T], which of them are this rank's, values [T, h]): adds values to rows, which may repeat; the
    # same bits every time
    add_rows: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], object]


EAGER = Kernels(
    dropout.eager,
    LossKernels(eager.loss_sums, eager.loss_kept, eager.loss_grad_),
    eager.rms_norm,
    eager.rms_norm_grad,
    eager.layer_norm_grad,
    None,
    None,
    eager.rotary,
    eager.add_rows,
)
TRITON = Kernels(
    operators.dropout,
    LossKernels(operators.loss_sums, operators.loss_kept, operators.loss_grad_),
    operators.rms_norm,
    operators.rms_norm_grad,
    operators.layer_norm_grad,
    Activation(operators.gelu, operators.gelu_grad_),
    Activation(operators.swiglu, operators.swiglu_grad),
    operators.rotary,
    operators.add_rows,
)


def kernels_named(name: str) -> Kernels:
    """Return the kernels that `TrainingConfig.kernels_on` names: triton or eager."""
    return {"eager": EAGER, "triton": TRITON}[name]
