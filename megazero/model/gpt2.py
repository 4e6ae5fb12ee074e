"""GPT-2: learned positions, LayerNorm, tanh GELU, biases, and a tied token table unless told otherwise."""

from __future__ import annotations

from megazero.config.schema import ModelConfig
from megazero.model.attention import Attention
from megazero.model.block import Architecture, PreNormBlock
from megazero.model.context import Context
from megazero.model.embedding import PositionEmbedding
from megazero.model.mlp import GeluMLP
from megazero.model.norm import LayerNorm


class Block(PreNormBlock):
    def __init__(self, model: ModelConfig, number: int, context: Context) -> None:
        super().__init__(model, number, context)
        self.norm1 = LayerNorm(model, context)
        self.attention = Attention(model, number, context)
        self.norm2 = LayerNorm(model, context)
        self.mlp = GeluMLP(model, context)


ARCHITECTURE = Architecture(Block, LayerNorm, PositionEmbedding)
