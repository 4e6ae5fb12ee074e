"""The blocks of all architectures, built from an architecture's traits.

Shapes: h hidden, T' tokens of the residual stream on this rank.
"""

import torch

from megazero.engine.model.experts.experts import Experts
from megazero.engine.model.layers.attention import Attention, FusedAttention, GroupedAttention
from megazero.engine.model.layers.context import Context, MicroBatchInfo
from megazero.engine.model.layers.latent_attention import LatentAttention
from megazero.engine.model.layers.layer import Layer
from megazero.engine.model.layers.linear import Call, Residual, Unsplit, normed_columns, rows_onto
from megazero.engine.model.layers.mlp import MLP
from megazero.engine.model.layers.norm import NORMS, NoNorm, Norm
from megazero.engine.options.architectures import ARCHITECTURES
from megazero.engine.options.schema import ModelConfig


def attention_of(model: ModelConfig, number: int, context: Context) -> Attention:
    """Return the attention of a block."""
    if model.multi_latent_attention:
        return LatentAttention(model, number, context)
    if model.traits.fused_qkv:
        return FusedAttention(model, number, context)
    return GroupedAttention(model, number, context, NORMS[model.traits.norm])


class SequentialBlock(Layer):
    """x + attention(norm(x)), then x + mlp(norm(x)); or norms after the branches, or both (`traits.norms`)."""

    def __init__(self, model: ModelConfig, number: int, context: Context) -> None:
        super().__init__()
        before, after = model.traits.norms != "after", model.traits.norms != "before"
        norm = NORMS[model.traits.norm]
        self.norm1: Norm = norm(model, context) if before else NoNorm()
        self.attention = attention_of(model, number, context)
        self.norm1_after = norm(model, context) if after else None
        self.norm2: Norm = norm(model, context) if before else NoNorm()
        self.mlp: Experts | MLP = Experts(model, number, context) if model.has_experts(number) else MLP(model, context)
        self.norm2_after = norm(model, context) if after else None
        dropouts = (context.dropout(model.hidden_dropout, number, site) for site in ("attention", "mlp"))
        self.residuals = [
            Residual(dropout, made, model.residual_multiplier)
            for dropout, made in zip(dropouts, (self.norm1_after, self.norm2_after), strict=True)
        ]

    def forward(self, x: torch.Tensor, tokens: MicroBatchInfo, output: bool = True) -> torch.Tensor:
        """x [T', h] -> [T', h]. If `output` is False, callers use only the graph: the last sum over tp is omitted."""
        x = self.attention(x, self.norm1, self.residuals[0], tokens)
        return self.mlp(x, self.norm2, self.residuals[1], Call(tokens.dropout_rows, output, tokens))


class ParallelBlock(Layer):
    """x + attention(norm(x)) + mlp(norm(x)), with one norm or two: one sum over tp, not two."""

    def __init__(self, model: ModelConfig, number: int, context: Context) -> None:
        super().__init__()
        norm = NORMS[model.traits.norm]
        self.norm = norm(model, context)
        self.attention = attention_of(model, number, context)
        self.mlp_norm = norm(model, context) if model.traits.parallel == 2 else None
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
            inner, x = normed_columns(x, self.mlp_norm, (mlp.up,), Unsplit())
        xs, activations = (a.attend(heads, tokens), inner), (None, mlp.activation)
        return rows_onto(
            x,
            xs,
            (a.proj, mlp.down),
            activations=activations,
            join=self.residual,
            call=Call(tokens.dropout_rows, output),
        )


# The class of each architecture's blocks, made as class(model, number, context). One with another arrangement of parts
# names its own here.
BLOCK_CLASSES: dict[str, type[Layer]] = {
    name: ParallelBlock if traits.parallel else SequentialBlock for name, traits in ARCHITECTURES.items()
}
