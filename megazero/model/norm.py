"""LayerNorm."""

from __future__ import annotations

import torch
import torch.nn as nn

from megazero.config.schema import ModelConfig
from megazero.model.context import Context

NORM_EPS = 1e-5


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, *handles):
        y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight.data, bias.data, NORM_EPS)
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
        return dx, None, None, None, None


class LayerNorm(nn.Module):
    """Over h; replicated over tp."""

    def __init__(self, model: ModelConfig, context: Context) -> None:
        super().__init__()
        self.weight, self.bias = context.weight(model.hidden_size, mean=1.0), context.weight(model.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _LayerNorm.apply(x, self.weight, self.bias, self.weight.handle, self.bias.handle)
