"""The contract of an architecture: its layers, and how a block is called.

A layer is a `Layer` that
- sets `use` and, unless it is a block, `end`;
- declares its weights in its constructor by `Context.weight`. A weight's global name is its path in the model;
- computes x [T', h] -> [T', h]. Its autograd Functions read weights as `weight.data` and hand gradients to
  `weight.accumulate_grad`. Collectives go through the context's axes, dropout through `Context.dropout`.

Nothing else is declared, because `price.trace.trace` runs the layer and records bytes, collectives and FLOPs. One
exception: a part that multiplies activations with each other has `score_flops`, the FLOPs of these products per token.

Shapes: h hidden, T' tokens of the residual stream on this rank (`context.ResidualStream`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
import torch.nn as nn

from megazero.config.schema import ModelConfig
from megazero.model.layers.context import Context, DeviceBatch, MicroBatchInfo
from megazero.model.layers.linear import Call
from megazero.model.layers.norm import Norm
from megazero.plan.layout.layers import End, Use


class Layer(nn.Module):
    """A layer, and its declarations for plans. The defaults are those of a block."""

    use = Use.LAYER  # of its weights
    end: End | None = None  # the end of the model at which it is; None: a block
    reads: tuple[str, ...] = ()  # units of other layers that it reads

    def compute(self, x: torch.Tensor | None, batch: DeviceBatch, output: bool) -> torch.Tensor:
        """Call the layer with the parts of a micro-batch that it reads. x [T', h]; None for the first layer.

        If `output` is False, callers use only the graph.
        """
        return self(x, batch.tokens, output)


class Architecture(NamedTuple):
    """The layers of an architecture, besides the token table."""

    block: Callable[[ModelConfig, int, Context], Layer]  # of a number; called as block(x, tokens, output)
    norm: Callable[[ModelConfig, Context], nn.Module]  # before the output matrix
    positions: Callable[[ModelConfig, Context], Layer] | None  # a layer after the token table
    # of a block's number: blocks of one kind differ in their number only; they are declared, traced and priced once
    kind: Callable[[ModelConfig, int], Hashable] = lambda model, number: None
    output_bias: bool = False  # whether the logits have a bias


class PreNormBlock(Layer):
    """x + attention(norm(x)), then x + mlp(norm(x)). A subclass makes the four parts."""

    norm1: Norm
    attention: nn.Module
    norm2: Norm
    mlp: nn.Module

    def __init__(self, model: ModelConfig, number: int, context: Context) -> None:
        super().__init__()
        self.dropout1 = context.dropout(model.hidden_dropout, number, "attention")
        self.dropout2 = context.dropout(model.hidden_dropout, number, "mlp")

    def forward(self, x: torch.Tensor, tokens: MicroBatchInfo, output: bool = True) -> torch.Tensor:
        """x [T', h] -> [T', h]. If `output` is False, callers use only the graph: the last sum over tp is omitted."""
        x = self.attention(x, self.norm1, self.dropout1, tokens)
        return self.mlp(x, self.norm2, self.dropout2, Call(tokens.dropout_rows, output))
