"""GPT-2: learned positions, LayerNorm, tanh GELU, biases, and a tied token table (by default)."""

from __future__ import annotations

from megazero.config.schema import ModelConfig
from megazero.model.layers.attention import Attention
from megazero.model.layers.block import Architecture, PreNormBlock
from megazero.model.layers.context import Context
from megazero.model.layers.embedding import PositionEmbedding
from megazero.model.layers.mlp import GeluMLP
from megazero.model.layers.norm import LayerNorm


class GPT2Block(PreNormBlock):
    def __init__(self, model: ModelConfig, number: int, context: Context) -> None:
        super().__init__(model, number, context)
        self.norm1 = LayerNorm(model, context)
        self.attention = Attention(model, number, context)
        self.norm2 = LayerNorm(model, context)
        self.mlp = GeluMLP(model, context)


ARCHITECTURE = Architecture(GPT2Block, LayerNorm, PositionEmbedding)
