"""MLPs: x + dropout(mlp(norm(x))), [T', h] -> [T', h]; their inner width is sharded over tp."""

from __future__ import annotations

import torch
import torch.nn as nn

from megazero.config.schema import ModelConfig
from megazero.kernels.dropout import Dropout
from megazero.kernels.table import Activation
from megazero.model.layers.context import Context
from megazero.model.layers.linear import Call, ColumnLinear, NormedColumns, ResidualRows, RowLinear, columns_and_rows
from megazero.model.layers.norm import Norm


class _MLP(nn.Module):
    """down(activation(up(norm(x))))"""

    up: ColumnLinear
    down: RowLinear
    activation: Activation

    def forward(self, x: torch.Tensor, norm: Norm, dropout: Dropout, call: Call) -> torch.Tensor:
        """x [T', h] -> x + dropout(mlp(norm(x))) [T', h]"""
        columns = NormedColumns(norm, (self.up,))
        return columns_and_rows(x, columns, ResidualRows((self.down,), (self.activation,), dropout), call)


class GeluMLP(_MLP):
    """down(gelu(up(norm(x))))"""

    def __init__(self, model: ModelConfig, context: Context) -> None:
        super().__init__()
        h, f = model.hidden_size, model.ffn_size
        self.up = ColumnLinear(context, h, f, std=model.init_method_std, bias=True)
        self.down = RowLinear(context, f, h, std=model.residual_std, bias=True)
        self.activation = context.kernels.gelu


class SwigluMLP(_MLP):
    """down(silu(gate(y)) * value(y)), y = norm(x). One weight [2, f, h] has gate and value; no biases."""

    def __init__(self, model: ModelConfig, context: Context) -> None:
        super().__init__()
        h, f = model.hidden_size, model.ffn_size
        self.up = ColumnLinear(context, h, 2, f, tp_dim=1, std=model.init_method_std, bias=False)
        self.down = RowLinear(context, f, h, std=model.residual_std, bias=False)
        self.activation = context.kernels.swiglu
