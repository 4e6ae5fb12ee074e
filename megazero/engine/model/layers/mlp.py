"""The MLP of a block: x + mlp(norm(x)), [T', h] -> [T', h]; its inner width is sharded over tp."""

import torch
import torch.nn as nn

from megazero.engine.kernels.kernel_table import GATED
from megazero.engine.model.layers.context import Context
from megazero.engine.model.layers.linear import (
    Call,
    ColumnLinear,
    NormedColumns,
    Residual,
    ResidualRows,
    RowLinear,
    columns_and_rows,
)
from megazero.engine.model.layers.norm import Norm
from megazero.engine.options.architectures import ActivationName
from megazero.engine.options.schema import ModelConfig


class MLP(nn.Module):
    """down(activation(up(norm(x)))). Of a gated activation, one weight [2, f, h] has gate and value."""

    def __init__(
        self, model: ModelConfig, context: Context, activation: ActivationName | None = None, bias: bool | None = None
    ) -> None:
        """activation, bias: None: as in the architecture's traits."""
        super().__init__()
        h, f, traits = model.hidden_size, model.ffn_size, model.traits
        name, bias = activation or traits.activation, "mlp" in traits.biases if bias is None else bias
        out, tp_dim, matrices = ((2, f), 1, (0,)) if name in GATED else ((f,), 0, ())
        std = model.init_method_std
        self.up = ColumnLinear(context, h, *out, tp_dim=tp_dim, std=std, bias=bias, matrices=matrices)
        self.down = RowLinear(context, f, h, std=model.residual_std, bias=bias)
        self.activation = context.kernels.activations[name]

    def forward(self, x: torch.Tensor, norm: Norm, residual: Residual, call: Call) -> torch.Tensor:
        """x [T', h] -> x + mlp(norm(x)) [T', h]; `residual` joins them."""
        rows = ResidualRows((self.down,), (self.activation,), residual)
        return columns_and_rows(x, NormedColumns(norm, (self.up,)), rows, call)
