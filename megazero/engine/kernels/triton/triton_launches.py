"""The launch of every Triton kernel, under the name of its operator."""

from megazero.engine.kernels.triton.triton_activations import gelu_grad_, swiglu, swiglu_grad_
from megazero.engine.kernels.triton.triton_dropout import dropout
from megazero.engine.kernels.triton.triton_loss import loss_grad_, loss_sums
from megazero.engine.kernels.triton.triton_norm import layer_norm_grad, rms_norm, rms_norm_grad
from megazero.engine.kernels.triton.triton_rotary import rotary_
from megazero.engine.kernels.triton.triton_rows import add_rows_

__all__ = ["add_rows_", "dropout", "gelu_grad_", "layer_norm_grad", "loss_grad_", "loss_sums", "rms_norm"]
__all__ += ["rms_norm_grad", "rotary_", "swiglu", "swiglu_grad_"]
