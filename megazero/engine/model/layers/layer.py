"""The contract of a layer.

A layer is a `Layer` that
- sets `use` and, unless it is a block, `end`;
- declares its weights in its constructor by `Context.weight`. A weight's global name is its path in the model;
- computes x [T', h] -> [T', h]. Its autograd Functions read weights as `weight.data` and hand gradients to
  `weight.accumulate_grad`. Collectives go through the context's axes, dropout through `Context.dropout`.

Nothing else is declared, because `planner.trace.trace` runs the layer and records bytes, collectives and FLOPs. One
exception: a part that multiplies activations with each other has `score_flops`, the FLOPs of these products per token.

Shapes: h hidden, T' tokens of the residual stream on this rank (`context.ResidualStream`).
"""

from collections.abc import Hashable

import torch
import torch.nn as nn

from megazero.engine.model.layers.context import DeviceBatch
from megazero.engine.options.schema import ModelConfig
from megazero.engine.plan.layout.layers import End, Use


class Layer(nn.Module):
    """A layer, and its declarations for plans. The defaults are those of a block."""

    use = Use.LAYER  # when the layer needs its weights
    end: End | None = None  # the end of the model at which it is; None: a block
    reads: tuple[str, ...] = ()  # units of other layers that it reads

    @staticmethod
    def kind(model: ModelConfig, number: int) -> Hashable:
        """Return a block's kind. Blocks of one kind differ in their number only, and are declared and traced once."""
        return model.attention_kind(number), model.has_experts(number)

    def compute(self, x: torch.Tensor | None, batch: DeviceBatch, output: bool) -> torch.Tensor:
        """Call the layer with the parts of a micro-batch that it reads. x [T', h]; None for the first layer.

        If `output` is False, callers use only the graph.
        """
        return self(x, batch.tokens, output)
