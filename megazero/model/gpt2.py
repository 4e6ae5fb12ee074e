"""GPT-2's architecture, the layers of one pipeline rank.

The residual stream is [T', h]: this rank's T' of the micro-batch's T = b s tokens (see `model.context.ResidualStream`).

Shapes: b micro-batch, s sequence, h hidden, n heads, d head dim, f ffn, v vocabulary; /tp = this rank's part.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn as nn

from megazero.comm.mesh import Mesh
from megazero.config.schema import ModelConfig
from megazero.model.attention import CoreAttention, attention_backend
from megazero.model.context import Context, DeviceBatch, MicroBatchInfo
from megazero.model.dropout import Dropout, Rows
from megazero.model.embedding import PositionEmbedding
from megazero.model.linear import ColumnLinear, RowLinear
from megazero.model.norm import LayerNorm
from megazero.model.vocabulary import VocabularyTable, vocabulary_loss
from megazero.plan.parameters import HEAD, POSITION_EMBEDDING, TOKEN_EMBEDDING, ParamSpec, stage_units


class Attention(nn.Module):
    """Causal self-attention; heads are sharded over tp."""

    def __init__(
        self, specs: dict[str, ParamSpec], model: ModelConfig, layer: int, seed: int, context: Context
    ) -> None:
        super().__init__()
        self.context = context
        self.num_heads = model.num_attention_heads // context.tp.size
        self.first_head = context.tp.rank * self.num_heads
        self.qkv = ColumnLinear(specs["attention.qkv.weight"], specs["attention.qkv.bias"], context)
        self.proj = RowLinear(specs["attention.proj.weight"], specs["attention.proj.bias"], context)
        dropout = Dropout(model.attention_dropout, seed, layer, "scores")
        self.core = CoreAttention(self.num_heads, dropout, context.fused_ops, context.selective)

    def forward(self, x: torch.Tensor, norm: nn.Module, tokens: MicroBatchInfo) -> torch.Tensor:
        """x [T', h] -> attention(norm(x)) [T', h]"""
        c, rows = self.context, None
        qkv = self.qkv(norm(x), c.recomputed(norm, x))  # [T, n/tp * 3 * d]
        if tokens.training and self.core.dropout.probability > 0:
            first, count = self.first_head * tokens.length, self.num_heads * tokens.length
            rows = tuple(Rows(sample, first, count) for sample in tokens.samples)
        backend = attention_backend(x.device.type, c.precision, rows is not None)
        return self.proj(self.core(qkv, len(tokens.samples), backend, rows))  # [T, h/tp] -> [T', h]


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fused_ops):
        ctx.save_for_backward(x)
        ctx.fused_ops = fused_ops
        return fused_ops.gelu(x)

    @staticmethod
    def backward(ctx, dy):
        return ctx.fused_ops.gelu_grad(dy, *ctx.saved_tensors), None


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, specs: list[ParamSpec], model: ModelConfig, layer: int, seed: int, context: Context) -> None:
        super().__init__()
        named = {spec.name.removeprefix(f"blocks.{layer}."): spec for spec in specs}
        self.context = context
        self.norm1 = LayerNorm(named["norm1.weight"], named["norm1.bias"], context)
        self.norm2 = LayerNorm(named["norm2.weight"], named["norm2.bias"], context)
        self.attention = Attention(named, model, layer, seed, context)
        self.mlp = nn.ModuleDict(
            {
                "up": ColumnLinear(named["mlp.up.weight"], named["mlp.up.bias"], context),
                "down": RowLinear(named["mlp.down.weight"], named["mlp.down.bias"], context),
            }
        )
        self.dropout1 = Dropout(model.hidden_dropout, seed, layer, "attention")
        self.dropout2 = Dropout(model.hidden_dropout, seed, layer, "mlp")

    def forward(self, x: torch.Tensor, tokens: MicroBatchInfo, output: bool = True) -> torch.Tensor:
        """x [T', h] -> [T', h]. `output` False: only the graph is needed, and the last sum over tp is left out."""
        c = self.context
        x = x + self.dropout1(self.attention(x, self.norm1, tokens), tokens.dropout_rows)
        inner = self.mlp["up"](self.norm2(x), c.recomputed(self.norm2, x))  # [T, f/tp], before GELU
        y = self.mlp["down"](self.gelu(inner), c.recomputed(self.gelu, inner), output)
        return x + self.dropout2(y, tokens.dropout_rows)

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        return _Gelu.apply(x, self.context.fused_ops)


class Head(nn.Module):
    """Final norm, then the vocabulary: loss, or logits. The output matrix is its own, or the token table."""

    def __init__(self, specs: list[ParamSpec], tied: VocabularyTable | None, context: Context) -> None:
        super().__init__()
        self.context = context
        self.norm = LayerNorm(specs[0], specs[1], context)
        self.output = VocabularyTable(specs[2], context) if tied is None else None
        self._tied = (tied,)  # in a tuple, so that it is not registered as a child: the table is a unit of its own

    @property
    def table(self) -> VocabularyTable:
        table = self.output or self._tied[0]
        assert table is not None
        return table

    def forward(self, x: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [T', h], labels and weights [b, s] -> the sum of weights x cross-entropy, in nats."""
        return vocabulary_loss(self.norm(x), self.table, labels, weights, self.context)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x [.., h] -> [.., v/tp], without a gradient."""
        return self.table.logits(self.norm(x))


class GPTStage(nn.Module):
    """The layers of one pipeline rank. With one rank it is the whole GPT."""

    def __init__(
        self, model: ModelConfig, mesh: Mesh, seed: int, context: Context, frozen: tuple[str, ...] = ()
    ) -> None:
        super().__init__()
        self.stream = context.stream
        self.units = stage_units(model, mesh.layout, mesh.pp.rank, frozen)
        units = self.units
        self.token_embedding = VocabularyTable(units[TOKEN_EMBEDDING][0], context) if TOKEN_EMBEDDING in units else None
        self.position_embedding = (
            PositionEmbedding(units[POSITION_EMBEDDING][0], model, seed, context)
            if POSITION_EMBEDDING in units
            else None
        )
        self.blocks = nn.ModuleDict()
        for layer in mesh.layout.layers(model.num_layers, mesh.pp.rank):
            self.blocks[str(layer)] = Block(units[f"blocks.{layer}"], model, layer, seed, context)
        tied = None if model.untie_embeddings else self.token_embedding
        self.head = Head(units[HEAD], tied, context) if HEAD in units else None

    def named_units(self) -> dict[str, list[tuple[ParamSpec, nn.Parameter]]]:
        """unit name -> its parameters with their specs."""
        parameters = dict(self.named_parameters())
        return {name: [(s, parameters[s.name]) for s in specs] for name, specs in self.units.items()}

    def compute(self, name: str) -> Callable[[torch.Tensor | None, DeviceBatch, bool], torch.Tensor]:
        """Bind layer `name` to what it reads of a micro-batch: compute(x, batch, output).

        `output` False: only the graph is needed; what is returned is never read.
        """
        layer = self.get_submodule(name)

        def token(x: None, batch: DeviceBatch, output: bool) -> torch.Tensor:
            return layer(batch.ids)

        def position(x: torch.Tensor, batch: DeviceBatch, output: bool) -> torch.Tensor:
            return layer(x, batch.tokens)

        def block(x: torch.Tensor, batch: DeviceBatch, output: bool) -> torch.Tensor:
            return layer(x, batch.tokens, output)

        def head(x: torch.Tensor, batch: DeviceBatch, output: bool) -> torch.Tensor:
            return layer(x, batch.labels, batch.loss_mask)

        found: dict[str, Callable[..., torch.Tensor]] = {
            TOKEN_EMBEDDING: token,
            POSITION_EMBEDDING: position,
            HEAD: head,
        }
        return found.get(name, block)

    def embed(self, ids: torch.Tensor, tokens: MicroBatchInfo) -> torch.Tensor:
        """ids [b, s] -> [T', h]; on the first pipeline rank."""
        assert self.token_embedding is not None and self.position_embedding is not None
        return self.position_embedding(self.token_embedding(ids), tokens)

    def body(self, x: torch.Tensor, tokens: MicroBatchInfo) -> torch.Tensor:
        """x [T', h] -> [T', h], through this rank's blocks."""
        for block in self.blocks.values():
            x = block(x, tokens)
        return x
