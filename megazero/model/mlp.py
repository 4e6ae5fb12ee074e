"""MLPs: mlp(norm(x)), [T', h] -> [T', h]; their inner width is sharded over tp."""

from __future__ import annotations

import torch
import torch.nn as nn

from megazero.config.schema import ModelConfig
from megazero.model.context import Context
from megazero.model.linear import ColumnLinear, RowLinear


class GeluMLP(nn.Module):
    """down(gelu(up(norm(x))))"""

    def __init__(self, model: ModelConfig, context: Context) -> None:
        super().__init__()
        h, f = model.hidden_size, model.ffn_size
        self.context, self.gelu = context, context.fused_ops.gelu
        self.up = ColumnLinear(context, h, f, std=model.init_method_std, bias=True)
        self.down = RowLinear(context, f, h, std=model.residual_std, bias=True)

    def forward(self, x: torch.Tensor, norm: nn.Module, output: bool = True) -> torch.Tensor:
        c = self.context
        inner = self.up(norm(x), c.recomputed(norm, x))  # [T, f/tp], before GELU
        return self.down(self.gelu(inner), c.recomputed(self.gelu, inner), output)


class SwigluMLP(nn.Module):
    """down(silu(gate(y)) * value(y)), y = norm(x). One weight [2, f, h] has gate and value; no biases."""

    def __init__(self, model: ModelConfig, context: Context) -> None:
        super().__init__()
        h, f = model.hidden_size, model.ffn_size
        self.context, self.swiglu = context, context.kernels.swiglu or context.fused_ops.swiglu
        self.up = ColumnLinear(context, h, 2, f, tp_dim=1, std=model.init_method_std, bias=False)
        self.down = RowLinear(context, f, h, std=model.residual_std, bias=False)

    def forward(self, x: torch.Tensor, norm: nn.Module, output: bool = True) -> torch.Tensor:
        c = self.context
        inner = self.up(norm(x), c.recomputed(norm, x))  # [T, 2 f/tp]
        return self.down(self.swiglu(inner), c.recomputed(self.swiglu, inner), output)
