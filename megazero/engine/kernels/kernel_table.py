"""The operations that have several implementations: torch's operators, which also test the others; Triton; compiled."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F

from megazero.engine.kernels import dropout, eager, operators
from megazero.engine.options.model_options import ActivationName

GATED = ("swiglu", "geglu-tanh", "swiglu-clamped")  # activations of [.., 2 f], gates and values -> [.., f]


class Activation(NamedTuple):
    """A function of x alone, and its gradient, below autograd."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    # (dy, x) -> dx, and its sum over tokens in fp32, or None if the sum needs a pass of its own; may overwrite dy and x
    grad: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]


class LossKernels(NamedTuple):
    """Softmax cross-entropy over a rank's products [T, v/tp], in fp32 (fp64 of fp64), which are overwritten.

    An `eager.LogitMap` maps products to logits, by default to themselves. Labels [T] are column numbers; those outside
    [0, num_columns) are other ranks'. Columns from num_columns on are padding.
    """

    # (products, labels, num_columns, map) -> maxima of logits [T], finite if the products are; [2, T]: sums of
    # exp(logit - maximum), and the labels' logits, 0 for other ranks' labels
    sums: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    # (exp(maximum here - over tp), sum over tp, log of the sum of exp(logit) over tp, map) -> [T], saved for the
    # gradient
    kept: Callable[..., torch.Tensor]
    # (products as `sums` left them, labels, num_columns, kept, scale [T], map) -> gradient of the products, in place:
    # (softmax - one hot) * scale * derivative of the map
    grad_: Callable[..., torch.Tensor]


class Kernels(NamedTuple):
    """Implementations of the operations between products and collectives, a value in `Context`."""

    dropout: dropout.Kernel
    loss: LossKernels
    # (x [.., h], weight, eps) -> y, 1 / rms(x) [.., 1] in fp32, or fp64 of fp64
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
    # (dy, x, weight, 1 / rms, None or another gradient of x, which is added) -> dx, dweight
    rms_norm_grad: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    # (dy, x, weight, bias, mean, 1 / deviation, None or another gradient of x) -> dx, dweight, dbias
    layer_norm_grad: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    activations: Mapping[ActivationName, Activation]
    # (scores [b, n, t, s]; the first key that each query sees, [b, t], None: 0; the last one, its own index, [b, t],
    # None: 0 to s - 1) -> weights; may overwrite scores
    causal_softmax: Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None], torch.Tensor]
    # (weights, weights after dropout, gradient of those, scale) -> gradient of the scores
    scores_grad: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
    # (q, k, v; as many results; tables; positions [b, s], None: 0 to s - 1; back): rotates q and k, copies v. All are
    # [b, s, heads, d]; back: by the negative angle
    rotary: Callable[..., None]
    # (table [v, h], rows [T], mask of this rank's rows, values [T, h]): adds values to rows, which may repeat, with the
    # same bits every time
    add_rows: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], object]


EAGER = Kernels(
    dropout=dropout.eager,
    loss=LossKernels(eager.loss_sums, eager.loss_kept, eager.loss_grad_),
    rms_norm=eager.rms_norm,
    rms_norm_grad=eager.rms_norm_grad,
    layer_norm_grad=eager.layer_norm_grad,
    activations={
        "gelu": Activation(F.gelu, eager.exact_gelu_grad),
        "gelu-tanh": Activation(eager.gelu, eager.gelu_grad),
        "relu": Activation(F.relu, eager.relu_grad),
        "squared-relu": Activation(eager.squared_relu, eager.squared_relu_grad),
        "swiglu": Activation(eager.swiglu, eager.swiglu_grad),
        "geglu-tanh": Activation(eager.geglu, eager.geglu_grad),
        "swiglu-clamped": Activation(eager.clamped_swiglu, eager.clamped_swiglu_grad),
    },
    causal_softmax=eager.causal_softmax,
    scores_grad=eager.scores_grad,
    rotary=eager.rotary,
    add_rows=eager.add_rows,
)
TRITON = EAGER._replace(
    dropout=operators.dropout,
    loss=LossKernels(operators.loss_sums, operators.loss_kept, operators.loss_grad_),
    rms_norm=operators.rms_norm,
    rms_norm_grad=operators.rms_norm_grad,
    layer_norm_grad=operators.layer_norm_grad,
    activations={
        **EAGER.activations,
        "gelu-tanh": Activation(eager.gelu, operators.gelu_grad_),
        "swiglu": Activation(operators.swiglu, operators.swiglu_grad),
    },
    rotary=operators.rotary,
    add_rows=operators.add_rows,
)
KERNELS = {"eager": EAGER, "triton": TRITON}  # by `TrainingConfig.kernels_on`
