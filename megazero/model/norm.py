"""LayerNorm."""

from __future__ import annotations

import torch
import torch.nn as nn

from megazero.model.context import Context, write_sum
from megazero.plan.parameters import ParamSpec

NORM_EPS = 1e-5


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, accumulate_grad):
        y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight.detach(), bias.detach(), NORM_EPS)
        ctx.save_for_backward(x, mean, rstd)
        ctx.weight, ctx.bias, ctx.accumulate_grad = weight, bias, accumulate_grad
        return y

    @staticmethod
    def backward(ctx, dy):
        x, mean, rstd = ctx.saved_tensors
        weight, bias = ctx.weight.detach(), ctx.bias.detach()
        dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
            dy, x, x.shape[-1:], mean, rstd, weight, bias, [True, True, True]
        )
        ctx.accumulate_grad(ctx.weight, write_sum(dweight))
        ctx.accumulate_grad(ctx.bias, write_sum(dbias))
        return dx, None, None, None


class LayerNorm(nn.Module):
    """Over h; replicated over tp."""

    def __init__(self, weight: ParamSpec, bias: ParamSpec, context: Context) -> None:
        super().__init__()
        self.accumulate_grad = context.accumulate_grad
        self.weight, self.bias = context.parameter(weight), context.parameter(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _LayerNorm.apply(x, self.weight, self.bias, self.accumulate_grad)
