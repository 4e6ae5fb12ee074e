"""LayerNorm and RMSNorm over the last dim, h unless another width is given; their weights are replicated over tp.

Shapes: T tokens, h hidden.
"""

from collections.abc import Iterable

import torch
import torch.nn as nn

from megazero.engine.kernels.eager import wide
from megazero.engine.model.layers.context import Context
from megazero.engine.model.layers.weight import WeightedModule, handle_of
from megazero.engine.options.model_options import ModelOptions, NormName


class Norm(WeightedModule):
    """A norm as two functions below autograd, for the Functions of linear layers; or called by itself."""

    has_bias = False
    mean = 1.0  # every initial weight

    def __init__(
        self, model: ModelOptions, context: Context, width: int | None = None, summed: Iterable[str] = ()
    ) -> None:
        """`summed`: axes over which ranks norm parts of one token, such as its heads; see `Context.weight`."""
        super().__init__()
        self.eps, self.kernels, width = model.norm_epsilon, context.kernels, width or model.hidden_size
        self.weight = context.weight(width, mean=self.mean, summed=summed)
        if self.has_bias:
            self.bias = context.weight(width, summed=summed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [.., h] -> [.., h]"""
        return _Norm.apply(x.flatten(0, -2), self, handle_of(self)).view(x.shape)

    def normalise(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """x [T, h] -> y [T, h], and the statistics per token that `input_grad` needs."""
        raise NotImplementedError

    def input_grad(
        self, dy: torch.Tensor, residual: torch.Tensor | None, x: torch.Tensor, *statistics: torch.Tensor
    ) -> torch.Tensor:
        """Hand over the weights' gradients; return that of x [T, h], plus `residual`, another gradient of x."""
        raise NotImplementedError


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, norm, handle):
        y, *statistics = norm.normalise(x)
        ctx.save_for_backward(x, *statistics)
        ctx.norm = norm
        return y

    @staticmethod
    def backward(ctx, dy):
        return ctx.norm.input_grad(dy, None, *ctx.saved_tensors), None, None


class LayerNorm(Norm):
    """(x - mean) / sqrt(variance + eps) * weight + bias"""

    has_bias = True

    def normalise(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.native_layer_norm(x, x.shape[-1:], self.weight.data, self.bias.data, self.eps)

    def input_grad(
        self, dy: torch.Tensor, residual: torch.Tensor | None, x: torch.Tensor, *statistics: torch.Tensor
    ) -> torch.Tensor:
        weights = self.weight.data, self.bias.data
        dx, dweight, dbias = self.kernels.layer_norm_grad(dy, x, *weights, *statistics, residual)
        self.weight.add_grad(dweight)
        self.bias.add_grad(dbias)
        return dx


class RMSNorm(Norm):
    """x / sqrt(mean(x^2) + eps) * weight"""

    @property
    def factor(self) -> torch.Tensor:
        return self.weight.data

    def normalise(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.kernels.rms_norm(x, self.factor, self.eps)

    def input_grad(
        self, dy: torch.Tensor, residual: torch.Tensor | None, x: torch.Tensor, *statistics: torch.Tensor
    ) -> torch.Tensor:
        dx, dweight = self.kernels.rms_norm_grad(dy, x, self.factor, *statistics, residual)
        self.weight.add_grad(dweight)
        return dx


class RMSNorm1p(RMSNorm):
    """x / sqrt(mean(x^2) + eps) * (1 + weight), as in Gemma. The sum is not rounded to 16 bit."""

    mean = 0.0

    @property
    def factor(self) -> torch.Tensor:
        return self.weight.data.to(wide(self.weight.data)) + 1


class NoNorm(Norm):
    """x itself."""

    def __init__(self) -> None:
        nn.Module.__init__(self)

    def normalise(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x,)

    def input_grad(
        self, dy: torch.Tensor, residual: torch.Tensor | None, x: torch.Tensor, *statistics: torch.Tensor
    ) -> torch.Tensor:
        return dy if residual is None else dy.add_(residual)


NORMS: dict[NormName, type[Norm]] = {"layernorm": LayerNorm, "rmsnorm": RMSNorm, "rmsnorm-1p": RMSNorm1p}
