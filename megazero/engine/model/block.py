"""The contract of a layer, and the blocks of all models, built from their options.

A layer is a `Layer` that
- sets `use` and, unless it is a block, `end`;
- declares its weights in its constructor by `Context.weight`. A weight's global name is its path in the model;
- computes x [T', h] -> [T', h]. Its autograd Functions read weights as `weight.data` and hand gradients to
  `weight.accumulate_grad`. Collectives go through the context's axes, dropout through `Context.dropout`.

Nothing else is declared, because `planner.trace.trace` runs the layer and records bytes, collectives and FLOPs. One
exception: a part that multiplies activations with each other has `score_flops`, the FLOPs of these products per token.

Shapes: h hidden, f ffn, T' tokens of the residual stream on this rank (`context.ResidualStream`).
"""

from collections.abc import Hashable

import torch
import torch.nn as nn

from megazero.engine.kernels.kernel_table import GATED
from megazero.engine.model.experts.experts import Experts
from megazero.engine.model.layers.attention import Attention, FusedAttention, GroupedAttention
from megazero.engine.model.layers.context import Context, DeviceBatch, MicroBatchInfo
from megazero.engine.model.layers.latent_attention import LatentAttention
from megazero.engine.model.layers.linear import (
    ColumnLinear,
    NormedColumns,
    Residual,
    ResidualRows,
    RowLinear,
    Split,
    columns_and_rows,
    normed_columns,
    rows_onto,
)
from megazero.engine.model.layers.norm import NORMS, NoNorm, Norm
from megazero.engine.options.model_options import ActivationName, ModelOptions
from megazero.engine.plan.layout.layers import End, Use


class Layer(nn.Module):
    """A layer, and its declarations for plans. The defaults are those of a block."""

    use = Use.LAYER  # when the layer needs its weights
    end: End | None = None  # the end of the model at which it is; None: a block
    reads: tuple[str, ...] = ()  # units of other layers that it reads

    @staticmethod
    def kind(model: ModelOptions, number: int) -> Hashable:
        """Return a block's kind. Blocks of one kind differ in their number only, and are declared and traced once."""
        return model.attention_kind(number), model.has_experts(number)

    def compute(self, x: torch.Tensor | None, batch: DeviceBatch, output: bool) -> torch.Tensor:
        """Call the layer with the parts of a micro-batch that it reads. x [T', h]; None for the first layer.

        If `output` is False, callers use only the graph.
        """
        return self(x, batch.tokens, output)


class MLP(nn.Module):
    """down(activation(up(x))); the inner width is sharded over tp. `up` has [2, f, h] if the activation is gated."""

    def __init__(
        self, model: ModelOptions, context: Context, activation: ActivationName | None = None, bias: bool | None = None
    ) -> None:
        """activation, bias: None: as in the options."""
        super().__init__()
        h, f = model.hidden_size, model.ffn_size
        name, bias = activation or model.activation, "mlp" in model.linear_biases if bias is None else bias
        out, tp_dim, matrices = ((2, f), 1, (0,)) if name in GATED else ((f,), 0, ())
        std = model.init_method_std
        self.up = ColumnLinear(context, h, *out, tp_dim=tp_dim, std=std, bias=bias, matrices=matrices)
        self.down = RowLinear(context, f, h, std=model.residual_std, bias=bias)
        self.activation = context.kernels.activations[name]

    def forward(
        self, x: torch.Tensor, norm: Norm, residual: Residual, tokens: MicroBatchInfo, output: bool
    ) -> torch.Tensor:
        """x [T', h] -> x + mlp(norm(x)) [T', h]; `residual` joins them."""
        rows = ResidualRows((self.down,), (self.activation,), residual, tokens.dropout_rows)
        return columns_and_rows(x, NormedColumns(norm, (self.up,)), rows, output)


def attention_of(model: ModelOptions, number: int, context: Context) -> Attention:
    """Return the attention of a block."""
    if model.multi_latent_attention:
        return LatentAttention(model, number, context)
    return (FusedAttention if model.fused_qkv else GroupedAttention)(model, number, context)


class SequentialBlock(Layer):
    """x + attention(norm(x)), then x + mlp(norm(x)); or norms after the branches, or both (`norm_place`)."""

    def __init__(self, model: ModelOptions, number: int, context: Context) -> None:
        super().__init__()
        before, after = model.norm_place != "after", model.norm_place != "before"
        norm = NORMS[model.norm]
        self.norm1: Norm = norm(model, context) if before else NoNorm()
        self.attention = attention_of(model, number, context)
        self.norm1_after = norm(model, context) if after else None
        self.norm2: Norm = norm(model, context) if before else NoNorm()
        self.mlp: Experts | MLP = Experts(model, number, context) if model.has_experts(number) else MLP(model, context)
        self.norm2_after = norm(model, context) if after else None
        self.residuals = [
            Residual(context.dropout(model.hidden_dropout, number, site), made, model.residual_multiplier)
            for site, made in (("attention", self.norm1_after), ("mlp", self.norm2_after))
        ]

    def forward(self, x: torch.Tensor, tokens: MicroBatchInfo, output: bool = True) -> torch.Tensor:
        """x [T', h] -> [T', h]. If `output` is False, callers use only the graph: the last sum over tp is omitted."""
        x = self.attention(x, self.norm1, self.residuals[0], tokens)
        return self.mlp(x, self.norm2, self.residuals[1], tokens, output=output)


class ParallelBlock(Layer):
    """x + attention(norm(x)) + mlp(norm(x)), with one norm or two: one sum over tp, not two."""

    def __init__(self, model: ModelOptions, number: int, context: Context) -> None:
        super().__init__()
        norm = NORMS[model.norm]
        self.norm = norm(model, context)
        self.attention = attention_of(model, number, context)
        self.mlp_norm = norm(model, context) if model.parallel_norms == 2 else None
        self.mlp = MLP(model, context)
        dropout = context.dropout(model.hidden_dropout, number, "block")
        self.residual = Residual(dropout, None, model.residual_multiplier)

    def forward(self, x: torch.Tensor, tokens: MicroBatchInfo, output: bool = True) -> torch.Tensor:
        """x [T', h] -> [T', h]"""
        a, mlp = self.attention, self.mlp
        if self.mlp_norm is None:
            *heads, inner, x = normed_columns(x, self.norm, (*a.columns, mlp.up), a.split(tokens))
        else:
            *heads, x = normed_columns(x, self.norm, a.columns, a.split(tokens))
            inner, x = normed_columns(x, self.mlp_norm, (mlp.up,), Split())
        rows = ResidualRows((a.proj, mlp.down), (None, mlp.activation), self.residual, tokens.dropout_rows)
        return rows_onto(x, (a.attend(heads, tokens), inner), rows, output)


# --parallel-norms -> class of blocks, made as class(model, number, context). One with another arrangement of parts has
# an option of its own.
BLOCK_CLASSES: dict[int, type[Layer]] = {0: SequentialBlock, 1: ParallelBlock, 2: ParallelBlock}
