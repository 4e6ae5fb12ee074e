"""GPT-2's architecture, one pipeline stage of it. Every layer is called through an injected run(layer, *args).

Shapes: b micro-batch, s sequence, h hidden, n heads, d head dim, f ffn, v vocabulary; /tp = this rank's part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from megazero.config import ModelConfig
from megazero.mesh import Mesh
from megazero.parameters import HEAD, POSITION, TOKEN, ParamSpec, stage_units
from megazero.rng import Dropout
from megazero.tensor_parallel import (
    ColumnLinear,
    Context,
    RowLinear,
    VocabularyTable,
    vocabulary_loss,
    write_sum,
)

Run = Callable[..., torch.Tensor]
Samples = tuple[int, ...] | None  # global numbers of a micro-batch's samples, for dropout; None in evaluation
NORM_EPS = 1e-5


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
    @staticmethod
    def forward(ctx, x, weight, contribute):
        ctx.weight, ctx.contribute = weight, contribute
        return x + weight.detach()[: x.shape[1]]

    @staticmethod
    def backward(ctx, dy):
        def write(out: torch.Tensor, add: bool) -> None:
            if not add:
                out.zero_()
            out[: dy.shape[1]] += dy.sum(0)

        ctx.contribute(ctx.weight, write)
        return dy, None, None


class PositionEmbedding(nn.Module):
    """Adds the learned positions; then the embedding's dropout."""

    def __init__(self, weight: ParamSpec, model: ModelConfig, seed: int, context: Context) -> None:
        super().__init__()
        self.contribute = context.contribute
        self.weight = context.parameter(weight)
        self.dropout = Dropout(model.hidden_dropout, seed, -1, "embedding")

    def forward(self, x: torch.Tensor, samples: Samples) -> torch.Tensor:
        """x [b, s, h] -> [b, s, h]"""
        return self.dropout(_AddPositions.apply(x, self.weight, self.contribute), samples)


class Attention(nn.Module):
    """Causal self-attention; heads are cut over tp."""

    def __init__(
        self, specs: dict[str, ParamSpec], model: ModelConfig, layer: int, seed: int, context: Context
    ) -> None:
        super().__init__()
        self.num_heads = model.num_attention_heads // context.tp.size
        self.first_head = context.tp.rank * self.num_heads
        self.qkv = ColumnLinear(specs["attention.qkv.weight"], specs["attention.qkv.bias"], context)
        self.proj = RowLinear(specs["attention.proj.weight"], specs["attention.proj.bias"], context)
        self.dropout = Dropout(model.attention_dropout, seed, layer, "scores")

    def forward(self, x: torch.Tensor, samples: Samples) -> torch.Tensor:
        b, s, _ = x.shape
        qkv = self.qkv(x).view(b, s, self.num_heads, 3, -1)  # [b, s, n/tp, 3, d]
        q, k, v = qkv.transpose(1, 2).unbind(3)  # [b, n/tp, s, d]
        if self.dropout.probability > 0 and samples is not None:
            y = self._with_dropout(q, k, v, samples)
        elif x.device.type == "cpu" and x.dtype != torch.float32:
            with sdpa_kernel(SDPBackend.MATH):  # 16-bit flash attention is 8 times slower on a CPU
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, s, -1))  # [b, s, h/tp] -> [b, s, h]

    def _with_dropout(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, samples: tuple[int, ...]
    ) -> torch.Tensor:
        """Attention with its weights in the open: the fused kernels draw masks that depend on the layout."""
        s, d = q.shape[-2:]
        future = torch.ones(s, s, dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ k.transpose(-1, -2)).mul(d**-0.5).masked_fill(future, -torch.inf)  # [b, n/tp, s, s]
        weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
        return self.dropout(weights, samples, self.first_head) @ v


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, specs: list[ParamSpec], model: ModelConfig, layer: int, seed: int, context: Context) -> None:
        super().__init__()
        named = {spec.name.removeprefix(f"blocks.{layer}."): spec for spec in specs}
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

    def forward(self, x: torch.Tensor, samples: Samples) -> torch.Tensor:
        """x [b, s, h] -> [b, s, h]"""
        x = x + self.dropout1(self.attention(self.norm1(x), samples), samples)
        inner = F.gelu(self.mlp["up"](self.norm2(x)), approximate="tanh")  # [b, s, f/tp]
        return x + self.dropout2(self.mlp["down"](inner), samples)


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
        """x [b, s, h], labels and weights [b, s] -> the sum of weights x cross-entropy, in nats."""
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

    def embed(self, ids: torch.Tensor, samples: Samples, run: Run = call) -> torch.Tensor:
        """ids [b, s] -> [b, s, h]; on the first stage."""
        return run(self.position_embedding, run(self.token_embedding, ids), samples)

    def body(self, x: torch.Tensor, samples: Samples, run: Run = call) -> torch.Tensor:
        """x [b, s, h] -> [b, s, h], through this stage's blocks."""
        for block in self.blocks.values():
            x = run(block, x, samples)
        return x
