"""GPT-2's architecture, one pipeline stage of it. Every layer is called through an injected run(layer, *args).

The residual stream is [T', h]: this rank's T' of the micro-batch's T = b s tokens (see `tensor_parallel.Stream`).

Shapes: b micro-batch, s sequence, h hidden, n heads, d head dim, f ffn, v vocabulary; /tp = this rank's part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from megazero.activations import attention_backend
from megazero.attention import Core
from megazero.config import ModelConfig
from megazero.mesh import Mesh
from megazero.parameters import HEAD, POSITION, TOKEN, ParamSpec, stage_units
from megazero.recompute import through
from megazero.rng import Dropout, Rows
from megazero.tensor_parallel import (
    ColumnLinear,
    Context,
    RowLinear,
    Stream,
    VocabularyTable,
    vocabulary_loss,
    write_sum,
)

Run = Callable[..., torch.Tensor]
NORM_EPS = 1e-5


class Tokens(NamedTuple):
    """A micro-batch as its layers see it: b samples of s tokens."""

    length: int  # s
    samples: tuple[int, ...]  # their global numbers, for dropout
    drops: bool  # in training
    rows: tuple[Rows, ...]  # the tokens of the residual stream on this rank, sample by sample; a row is a position

    @classmethod
    def of(cls, ids: torch.Tensor, samples: tuple[int, ...], stream: Stream, *, drops: bool) -> Tokens:
        """ids [b, s]"""
        assert len(samples) == len(ids), (samples, ids.shape)
        held, length, rows = stream.tokens(ids.numel()), ids.shape[1], []
        at = held.start
        while at < held.stop:
            sample, first = divmod(at, length)
            stop = min(held.stop, at - first + length)
            rows.append(Rows(samples[sample], first, stop - at))
            at = stop
        return cls(length, samples, drops, tuple(rows))

    @property
    def dropped(self) -> tuple[Rows, ...] | None:
        """The rows of the residual stream's dropout masks; None in evaluation."""
        return self.rows if self.drops else None


def call(layer: nn.Module, *args: Any) -> torch.Tensor:
    """The plain `run`."""
    return layer(*args)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, contribute):
        y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight.detach(), bias.detach(), NORM_EPS)
        ctx.save_for_backward(x, mean, rstd)
        ctx.weight, ctx.bias, ctx.contribute = weight, bias, contribute
        return y

    @staticmethod
    def backward(ctx, dy):
        x, mean, rstd = ctx.saved_tensors
        weight, bias = ctx.weight.detach(), ctx.bias.detach()
        dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
            dy, x, x.shape[-1:], mean, rstd, weight, bias, [True, True, True]
        )
        ctx.contribute(ctx.weight, write_sum(dweight))
        ctx.contribute(ctx.bias, write_sum(dbias))
        return dx, None, None, None


class LayerNorm(nn.Module):
    """Over h; replicated over tp."""

    def __init__(self, weight: ParamSpec, bias: ParamSpec, context: Context) -> None:
        super().__init__()
        self.contribute = context.contribute
        self.weight, self.bias = context.parameter(weight), context.parameter(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _LayerNorm.apply(x, self.weight, self.bias, self.contribute)


class _AddPositions(torch.autograd.Function):
    """`rows`: which positions the tokens of x have."""

    @staticmethod
    def forward(ctx, x, weight, rows, contribute):
        ctx.weight, ctx.rows, ctx.contribute = weight, rows, contribute
        y = torch.empty_like(x)
        for part, into, row in zip(*(_split(t, rows) for t in (x, y)), rows, strict=True):
            torch.add(part, weight.detach()[row.first : row.first + row.count], out=into)
        return y

    @staticmethod
    def backward(ctx, dy):
        def write(out: torch.Tensor, add: bool) -> None:
            if not add:
                out.zero_()
            for part, row in zip(_split(dy, ctx.rows), ctx.rows, strict=True):
                out[row.first : row.first + row.count] += part

        ctx.contribute(ctx.weight, write)
        return dy, None, None, None


def _split(x: torch.Tensor, rows: tuple[Rows, ...]) -> tuple[torch.Tensor, ...]:
    return x.split([row.count for row in rows])


class PositionEmbedding(nn.Module):
    """Adds the learned positions; then the embedding's dropout."""

    def __init__(self, weight: ParamSpec, model: ModelConfig, seed: int, context: Context) -> None:
        super().__init__()
        self.contribute = context.contribute
        self.weight = context.parameter(weight)
        self.dropout = Dropout(model.hidden_dropout, seed, -1, "embedding")

    def forward(self, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """x [T', h] -> [T', h]"""
        return self.dropout(_AddPositions.apply(x, self.weight, tokens.rows, self.contribute), tokens.dropped)


class Attention(nn.Module):
    """Causal self-attention; heads are cut over tp."""

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
        self.core = Core(self.num_heads, dropout, context.pieces, context.selective)

    def forward(self, x: torch.Tensor, norm: nn.Module, tokens: Tokens) -> torch.Tensor:
        """x [T', h] -> attention(norm(x)) [T', h]"""
        c, rows = self.context, None
        qkv = through(norm, self.qkv, x, again=c.selective)  # [T, n/tp * 3 * d]
        if tokens.drops and self.core.dropout.probability > 0:
            first, count = self.first_head * tokens.length, self.num_heads * tokens.length
            rows = tuple(Rows(sample, first, count) for sample in tokens.samples)
        backend = attention_backend(x.device.type, c.precision, rows is not None)
        return self.proj(self.core(qkv, len(tokens.samples), backend, rows))  # [T, h/tp] -> [T', h]


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, pieces):
        ctx.save_for_backward(x)
        ctx.pieces = pieces
        return pieces.gelu(x)

    @staticmethod
    def backward(ctx, dy):
        return ctx.pieces.gelu_grad(dy, *ctx.saved_tensors), None


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

    def forward(self, x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """x [T', h] -> [T', h]"""
        again = self.context.selective
        x = x + self.dropout1(self.attention(x, self.norm1, tokens), tokens.dropped)
        inner = through(self.norm2, self.mlp["up"], x, again=again)  # [T, f/tp], before GELU
        return x + self.dropout2(through(self.gelu, self.mlp["down"], inner, again=again), tokens.dropped)

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        return _Gelu.apply(x, self.context.pieces)


class Head(nn.Module):
    """Final norm, then the vocabulary: loss, or logits. The output matrix is its own, or the token table."""

    def __init__(self, specs: list[ParamSpec], tied: VocabularyTable | None, context: Context) -> None:
        super().__init__()
        self.context = context
        self.norm = LayerNorm(specs[0], specs[1], context)
        self.output = VocabularyTable(specs[2], context) if tied is None else None
        self._tied = (tied,)  # in a tuple, lest it count as a child: the table is a unit of its own

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
    """The layers of one pipeline stage. With one stage it is the whole GPT."""

    def __init__(
        self, model: ModelConfig, mesh: Mesh, seed: int, context: Context, frozen: tuple[str, ...] = ()
    ) -> None:
        super().__init__()
        self.stream = context.stream
        self.units = stage_units(model, mesh.layout, mesh.pp.rank, frozen)
        units = self.units
        self.token_embedding = VocabularyTable(units[TOKEN][0], context) if TOKEN in units else None
        self.position_embedding = (
            PositionEmbedding(units[POSITION][0], model, seed, context) if POSITION in units else None
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

    def embed(self, ids: torch.Tensor, tokens: Tokens, run: Run = call) -> torch.Tensor:
        """ids [b, s] -> [T', h]; on the first stage."""
        return run(self.position_embedding, run(self.token_embedding, ids), tokens)

    def body(self, x: torch.Tensor, tokens: Tokens, run: Run = call) -> torch.Tensor:
        """x [T', h] -> [T', h], through this stage's blocks."""
        for block in self.blocks.values():
            x = run(block, x, tokens)
        return x
