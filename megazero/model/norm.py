"""LayerNorm and RMSNorm, over h, replicated over tp."""

from __future__ import annotations

import torch
import torch.nn as nn

from megazero.config.schema import ModelConfig
from megazero.model.context import Context
from megazero.model.fused_ops import wide


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, *handles):
        y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight.data, bias.data, eps)
        ctx.save_for_backward(x, mean, rstd)
        ctx.weight, ctx.bias = weight, bias
        return y

    @staticmethod
    def backward(ctx, dy):
        x, mean, rstd = ctx.saved_tensors
        dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
            dy, x, x.shape[-1:], mean, rstd, ctx.weight.data, ctx.bias.data, [True, True, True]
        )
        ctx.weight.add_grad(dweight)
        ctx.bias.add_grad(dbias)
        return dx, *[None] * 5


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias"""

    def __init__(self, model: ModelConfig, context: Context) -> None:
        super().__init__()
        self.eps = model.norm_epsilon
        self.weight, self.bias = context.weight(model.hidden_size, mean=1.0), context.weight(model.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _LayerNorm.apply(x, self.weight, self.bias, self.eps, self.weight.handle, self.bias.handle)


class _RMSNorm(torch.autograd.Function):
    """Keeps x and a number per token. Sums and quotients are in fp32, or fp64 of fp64."""

    @staticmethod
    def forward(ctx, x, weight, eps, handle):
        exact = x.to(wide(x))
        rstd = exact.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, rstd)
        ctx.weight = weight
        return (exact * rstd).to(x.dtype).mul_(weight.data)

    @staticmethod
    def backward(ctx, dy):
        x, rstd = ctx.saved_tensors
        normed, dy = x.to(rstd.dtype) * rstd, dy.to(rstd.dtype)
        ctx.weight.add_grad((dy * normed).sum(0))
        dnormed = dy * ctx.weight.data.to(rstd.dtype)
        mean = (dnormed * normed).mean(-1, keepdim=True)
        dx = dnormed.sub_(normed.mul_(mean)).mul_(rstd)
        return dx.to(x.dtype), None, None, None


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight"""

    def __init__(self, model: ModelConfig, context: Context) -> None:
        super().__init__()
        self.eps, self.weight = model.norm_epsilon, context.weight(model.hidden_size, mean=1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _RMSNorm.apply(x, self.weight, self.eps, self.weight.handle)
