"""Llama: rotary positions, RMSNorm, SwiGLU, grouped-query attention, no biases, an output matrix of its own.

Qwen 2 is the same with biases of queries, keys and values (--add-qkv-bias), Qwen 3 with norms of each head's queries
and keys (--qk-layernorm).
"""

from __future__ import annotations

from megazero.config.schema import ModelConfig
from megazero.model.layers.attention import GroupedAttention
from megazero.model.layers.block import Architecture, PreNormBlock
from megazero.model.layers.context import Context
from megazero.model.layers.mlp import SwigluMLP
from megazero.model.layers.norm import RMSNorm


class LlamaBlock(PreNormBlock):
    def __init__(self, model: ModelConfig, number: int, context: Context) -> None:
        super().__init__(model, number, context)
        self.norm1 = RMSNorm(model, context)
        self.attention = GroupedAttention(model, number, context, RMSNorm)
        self.norm2 = RMSNorm(model, context)
        self.mlp = SwigluMLP(model, context)


ARCHITECTURE = Architecture(LlamaBlock, RMSNorm, positions=None)
