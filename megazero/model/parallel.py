"""GPT-J's block: attention and MLP read the same norm, side by side, and are added together.

So a block has one gather and one sum over tp, not two. Rotary positions over whole heads, LayerNorm, tanh GELU; biases
in the MLP, in attention only if asked for (--add-qkv-bias).
"""

from __future__ import annotations

import torch

from megazero.config.schema import ModelConfig
from megazero.model.attention import GroupedAttention
from megazero.model.block import Architecture, Layer
from megazero.model.context import Context, MicroBatchInfo
from megazero.model.linear import column_linears, row_linears
from megazero.model.mlp import GeluMLP
from megazero.model.norm import LayerNorm


class Block(Layer):
    """x + attention(norm(x)) + mlp(norm(x))"""

    def __init__(self, model: ModelConfig, number: int, context: Context) -> None:
        super().__init__()
        self.context = context
        self.norm = LayerNorm(model, context)
        self.attention = GroupedAttention(model, number, context)
        self.mlp = GeluMLP(model, context)
        self.dropout = context.dropout(model.hidden_dropout, number, "block")

    def forward(self, x: torch.Tensor, tokens: MicroBatchInfo, output: bool = True) -> torch.Tensor:
        """x [T', h] -> [T', h]"""
        c, a, mlp = self.context, self.attention, self.mlp
        linears = (a.query, a.kv, mlp.up)
        query, kv, inner = column_linears(linears, self.norm(x), c.recomputed(self.norm, x))
        inputs, recomputed = (a.attend(query, kv, tokens), mlp.gelu(inner)), (None, c.recomputed(mlp.gelu, inner))
        y = row_linears((a.proj, mlp.down), inputs, recomputed, output)
        return self.dropout(y, tokens.dropout_rows, x)


ARCHITECTURE = Architecture(Block, LayerNorm, positions=None)
