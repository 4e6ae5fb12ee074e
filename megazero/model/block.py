"""The contract of an architecture: what its layers are, and how a block is called.

A layer is a `Layer` that
- declares its use of its weights, and the end of the model that it is at, unless it is a block;
- declares its weights in its constructor, by `Context.weight`, where it uses them. A weight's global name is its path;
- computes x [T', h] -> [T', h]: weights are read as `weight.data` inside autograd Functions, which hand gradients to
  `weight.accumulate_grad`; collectives go through the context's axes, dropout through `Context.dropout`;
- says nothing else, but that a part with products of activations with each other has `score_flops`, their FLOPs per
  token. Its bytes, collectives and FLOPs are found by running it (`price.trace`).

The residual stream is [T', h]: this rank's T' of the micro-batch's T = b s tokens (see `model.context.ResidualStream`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
import torch.nn as nn

from megazero.config.schema import ModelConfig
from megazero.model.context import Context, DeviceBatch, MicroBatchInfo
from megazero.model.linear import Call
from megazero.model.norm import Norm
from megazero.plan.layers import End, Use


class Layer(nn.Module):
    """A layer, and its declarations for plans. The defaults are those of a block.

    Attributes:
        use: of its weights.
        end: of the model; None: a block, which any pipeline stage may hold.
        reads: units of other layers that it reads besides its own.
    """

    use = Use.LAYER
    end: End | None = None
    reads: tuple[str, ...] = ()

    def compute(self, x: torch.Tensor | None, batch: DeviceBatch, output: bool) -> torch.Tensor:
        """Call the layer with the parts of a micro-batch that it reads. x [T', h]; None: there is no layer before it.

        `output` False: only the graph is needed; the returned tensor is never read.
        """
        return self(x, batch.tokens, output)


class Architecture(NamedTuple):
    """The layers that a model of this architecture is made of, besides the token table.

    Blocks of equal `kind` are declared, traced and priced once.
    """

    block: Callable[[ModelConfig, int, Context], Layer]  # called as block(x, tokens, output); the number: its place
    norm: Callable[[ModelConfig, Context], nn.Module]  # before the output matrix
    positions: Callable[[ModelConfig, Context], Layer] | None  # a layer behind the token table, or none
    kind: Callable[[ModelConfig, int], Hashable] = lambda model, number: None  # equal: they differ in number alone


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
        """x [T', h] -> [T', h]. `output` False: only the graph is needed, and the last sum over tp is left out."""
        x = self.attention(x, self.norm1, self.dropout1, tokens)
        return self.mlp(x, self.norm2, self.dropout2, Call(tokens.dropout_rows, output))
