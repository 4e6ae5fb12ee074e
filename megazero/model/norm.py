"""LayerNorm and RMSNorm over the last dim, h unless another width is given; their weights are replicated over tp."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn as nn

from megazero.config.schema import ModelConfig
from megazero.model.context import Context


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, kernels, *handles):
        y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight.data, bias.data, eps)
        ctx.save_for_backward(x, mean, rstd)
        ctx.weight, ctx.bias, ctx.kernels = weight, bias, kernels
        return y

    @staticmethod
    def backward(ctx, dy):
        x, mean, rstd = ctx.saved_tensors
        dx, dweight, dbias = ctx.kernels.layer_norm_grad(dy, x, ctx.weight.data, ctx.bias.data, mean, rstd)
        ctx.weight.add_grad(dweight)
        ctx.bias.add_grad(dbias)
        return dx, *[None] * 6


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias"""

    def __init__(
        self, model: ModelConfig, context: Context, width: int | None = None, summed: Iterable[str] = ()
    ) -> None:
        """`summed`: axes over which ranks norm parts of one token, such as its heads; see `Context.weight`."""
        super().__init__()
        self.eps, self.kernels, width = model.norm_epsilon, context.kernels, width or model.hidden_size
        self.weight = context.weight(width, mean=1.0, summed=summed)
        self.bias = context.weight(width, summed=summed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        handles = self.weight.handle, self.bias.handle
        return _LayerNorm.apply(x, self.weight, self.bias, self.eps, self.kernels, *handles)


class _RMSNorm(torch.autograd.Function):
    """Keeps x and a number per token."""

    @staticmethod
    def forward(ctx, x, weight, eps, kernels, handle):
        y, rstd = kernels.rms_norm(x, weight.data, eps)
        ctx.save_for_backward(x, rstd)
        ctx.weight, ctx.kernels = weight, kernels
        return y

    @staticmethod
    def backward(ctx, dy):
        dx, dweight = ctx.kernels.rms_norm_grad(dy, ctx.saved_tensors[0], ctx.weight.data, ctx.saved_tensors[1])
        ctx.weight.add_grad(dweight)
        return dx, None, None, None, None


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight"""

    def __init__(
        self, model: ModelConfig, context: Context, width: int | None = None, summed: Iterable[str] = ()
    ) -> None:
        """`summed`: axes over which ranks norm parts of one token, such as its heads; see `Context.weight`."""
        super().__init__()
        self.eps, self.kernels = model.norm_epsilon, context.kernels
        self.weight = context.weight(width or model.hidden_size, mean=1.0, summed=summed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _RMSNorm.apply(x, self.weight, self.eps, self.kernels, self.weight.handle)
