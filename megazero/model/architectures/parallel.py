"""GPT-J's block: attention and MLP read the same norm, and their results are added.

So a block has one gather and one sum over tp, not two. Rotary positions over whole heads, LayerNorm, tanh GELU. The MLP
has biases, attention only if --add-qkv-bias.
"""

from __future__ import annotations

import torch

from megazero.config.schema import ModelConfig
from megazero.model.layers.attention import GroupedAttention
from megazero.model.layers.block import Architecture, Layer
from megazero.model.layers.context import Context, MicroBatchInfo
from megazero.model.layers.linear import Call, normed_columns, rows_onto
from megazero.model.layers.mlp import GeluMLP
from megazero.model.layers.norm import LayerNorm


class ParallelBlock(Layer):
    """x + attention(norm(x)) + mlp(norm(x))"""

    def __init__(self, model: ModelConfig, number: int, context: Context) -> None:
        super().__init__()
        self.norm = LayerNorm(model, context)
        self.attention = GroupedAttention(model, number, context, LayerNorm)
        self.mlp = GeluMLP(model, context)
        self.dropout = context.dropout(model.hidden_dropout, number, "block")

    def forward(self, x: torch.Tensor, tokens: MicroBatchInfo, output: bool = True) -> torch.Tensor:
        """x [T', h] -> [T', h]"""
        a, mlp = self.attention, self.mlp
        *heads, inner, x = normed_columns(x, self.norm, (*a.columns, mlp.up), a.split(tokens))
        xs, activations = (a.attend(heads, tokens), inner), (None, mlp.activation)
        call = Call(tokens.dropout_rows, output)
        return rows_onto(x, xs, (a.proj, mlp.down), activations, self.dropout, call)


ARCHITECTURE = Architecture(ParallelBlock, LayerNorm, positions=None)
