"""LayerNorm and RMSNorm, over h, replicated over tp."""

from __future__ import annotations

import torch
import torch.nn as nn

from megazero.config.schema import ModelConfig
from megazero.model.context import Context
from megazero.model.weight import Weight, handle_of


class Norm(nn.Module):
    """A norm as two functions below autograd, which a linear layer behind it calls in its own Function."""

    weights: tuple[Weight, ...]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [.., h] -> [.., h], by itself."""
        return _Norm.apply(x, self, handle_of(self))

    def normalise(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """x [.., h] -> y [.., h], and the numbers per token that `input_grad` needs besides x."""
        raise NotImplementedError

    def input_grad(
        self, dy: torch.Tensor, residual: torch.Tensor | None, x: torch.Tensor, *numbers: torch.Tensor
    ) -> torch.Tensor:
        """Hand over the weights' gradients; return that of x [T, h], plus `residual`, another gradient of x."""
        raise NotImplementedError


class _Norm(torch.autograd.Function):
    """Keeps x and the numbers per token."""

    @staticmethod
    def forward(ctx, x, norm, handle):
        y, *numbers = norm.normalise(x)
        ctx.save_for_backward(x, *numbers)
        ctx.norm = norm
        return y

    @staticmethod
    def backward(ctx, dy):
        return ctx.norm.input_grad(dy, None, *ctx.saved_tensors), None, None


class LayerNorm(Norm):
    """(x - mean) / sqrt(variance + eps) * weight + bias"""

    def __init__(self, model: ModelConfig, context: Context) -> None:
        super().__init__()
        self.eps, self.kernels = model.norm_epsilon, context.kernels
        self.weight, self.bias = context.weight(model.hidden_size, mean=1.0), context.weight(model.hidden_size)
        self.weights = self.weight, self.bias

    def normalise(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.native_layer_norm(x, x.shape[-1:], self.weight.data, self.bias.data, self.eps)

    def input_grad(
        self, dy: torch.Tensor, residual: torch.Tensor | None, x: torch.Tensor, *numbers: torch.Tensor
    ) -> torch.Tensor:
        dx, dweight, dbias = self.kernels.layer_norm_grad(dy, x, self.weight.data, self.bias.data, *numbers, residual)
        self.weight.add_grad(dweight)
        self.bias.add_grad(dbias)
        return dx


class RMSNorm(Norm):
    """x / sqrt(mean(x^2) + eps) * weight"""

    def __init__(self, model: ModelConfig, context: Context) -> None:
        super().__init__()
        self.eps, self.kernels = model.norm_epsilon, context.kernels
        self.weight = context.weight(model.hidden_size, mean=1.0)
        self.weights = (self.weight,)

    def normalise(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.kernels.rms_norm(x, self.weight.data, self.eps)

    def input_grad(
        self, dy: torch.Tensor, residual: torch.Tensor | None, x: torch.Tensor, *numbers: torch.Tensor
    ) -> torch.Tensor:
        dx, dweight = self.kernels.rms_norm_grad(dy, x, self.weight.data, *numbers, residual)
        self.weight.add_grad(dweight)
        return dx
