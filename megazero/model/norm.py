"""LayerNorm and RMSNorm over the last dim, h unless another width is given; their weights are replicated over tp."""

from __future__ import annotations

from collections.abc import Iterable

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
        return _Norm.apply(x.flatten(0, -2), self, handle_of(self)).view(x.shape)

    def normalise(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """x [T, h] -> y [T, h], and the numbers per token that `input_grad` needs besides x."""
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

    def __init__(
        self, model: ModelConfig, context: Context, width: int | None = None, summed: Iterable[str] = ()
    ) -> None:
        """`summed`: axes over which ranks norm parts of one token, such as its heads; see `Context.weight`."""
        super().__init__()
        self.eps, self.kernels, width = model.norm_epsilon, context.kernels, width or model.hidden_size
        self.weight = context.weight(width, mean=1.0, summed=summed)
        self.bias = context.weight(width, summed=summed)
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

    def __init__(
        self, model: ModelConfig, context: Context, width: int | None = None, summed: Iterable[str] = ()
    ) -> None:
        """`summed`: axes over which ranks norm parts of one token, such as its heads; see `Context.weight`."""
        super().__init__()
        self.eps, self.kernels = model.norm_epsilon, context.kernels
        self.weight = context.weight(width or model.hidden_size, mean=1.0, summed=summed)
        self.weights = (self.weight,)

    def normalise(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.kernels.rms_norm(x, self.weight.data, self.eps)

    def input_grad(
        self, dy: torch.Tensor, residual: torch.Tensor | None, x: torch.Tensor, *numbers: torch.Tensor
    ) -> torch.Tensor:
        dx, dweight = self.kernels.rms_norm_grad(dy, x, self.weight.data, *numbers, residual)
        self.weight.add_grad(dweight)
        return dx
