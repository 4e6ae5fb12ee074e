"""Causal self-attention, and its core: attention of the heads that are on this rank, fused or explicit.

Fused: see `fused_attention`. Explicit: attention weights, [t, s] per head, which are saved for backward or recomputed
(selective recompute). It is used where the fused kernels are missing or slow:
- with dropout, whose masks depend on coordinates;
- with a soft cap. The capped scores are saved in place of the weights, as many bytes;
- in 16 bit on a CPU, where they are 8 times slower;
- in fp64 on a GPU, and with documents in fp32 on a GPU.

Both can restrict attention to documents, and to a window of tokens. With context parallelism, queries are those of this
rank's tokens, and keys and values of other tokens come from the other ranks: see `key_exchange`.

Shapes: b micro-batch, s tokens of a sample, t those of a sample on this rank, T = b t, T' tokens of the residual stream
on this rank, h hidden, n heads of the model, n/tp heads of this rank, g groups of keys and values of this rank, d head
dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn as nn

from megazero.engine.kernels.dropout import Dropout, Rows
from megazero.engine.kernels.eager import Tensors
from megazero.engine.kernels.kernel_table import Kernels
from megazero.engine.kernels.matmul import upcasts
from megazero.engine.kernels.rotary import Rotary, RotaryTables
from megazero.engine.mesh.collectives import Axis
from megazero.engine.model.context_parallel.dealt import DealtTokens, score_rows
from megazero.engine.model.context_parallel.key_exchange import AllKeys, GatheredKeys, RingKeys
from megazero.engine.model.documents import Documents
from megazero.engine.model.layers.context import Context, MicroBatchInfo
from megazero.engine.model.layers.fused_attention import fused_attention, is_attention_fused
from megazero.engine.model.layers.head_norms import AllHeads, EachHead, HeadsWeight
from megazero.engine.model.layers.linear import (
    ColumnLinear,
    Residual,
    ResidualRows,
    RowLinear,
    Split,
    normed_columns,
    rows_onto,
)
from megazero.engine.model.layers.norm import NORMS, Norm
from megazero.engine.model.layers.sinks import Sinks
from megazero.engine.model.scores import PLAIN, Scores
from megazero.engine.options.model_options import ModelOptions


@dataclass(frozen=True)
class CoreAttention:
    """The attention core of one layer."""

    dropout: Dropout
    kernels: Kernels
    recompute: bool  # make explicit attention weights, and gather keys, again in backward instead of saving them
    scores: Scores = PLAIN
    cp: Axis | None = None  # over which tokens are dealt; None: over none
    ring: bool = False  # exchange keys in a ring where the kernel can
    sinks: Sinks | None = None

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        fused: bool,
        rows: tuple[Rows, ...] | None,
        documents: Documents | None = None,
        dealt: DealtTokens | None = None,
    ) -> torch.Tensor:
        """q [b, n/tp, t, d], k and v [b, g, t, d] -> [T, n/tp * d]

        Args:
            rows: numbers of the dropout mask's rows, one for each head and query; None without dropout.
            documents: restrict attention to these, of whole samples; None: to samples.
            dealt: the tokens of each rank; None: this rank has all.
        """
        keys = self.exchange(fused, dealt)
        if not fused:
            handle = None if self.sinks is None else self.sinks.weight.handle
            y = _ExplicitAttention.apply(q, k, v, self, rows, documents, dealt, keys, handle)
        else:
            assert rows is None, "the fused kernels draw masks that depend on the layout"
            scores, sinks = self.scores, self.sinks
            y = fused_attention(q, k, v, scores=scores, documents=documents, dealt=dealt, keys=keys, sinks=sinks)
        return y.transpose(1, 2).reshape(q.shape[0] * q.shape[2], -1)

    def exchange(self, fused: bool, dealt: DealtTokens | None) -> AllKeys:
        if dealt is None or self.cp is None:
            return AllKeys()
        if self.ring and fused and not self.scores.window:
            return RingKeys(self.cp, dealt)
        return GatheredKeys(self.cp, dealt, self.recompute)

    def capped(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Return scale x q k^T under the soft cap, [b, n/tp, t, s] in q's dtype.

        Queries are scaled, not scores, because q k^T alone can overflow in fp16.
        """
        return self.scores.cap_(_matmul(q * self.scores.factor(q.shape[-1]), k.transpose(-1, -2)))

    def weights(
        self, capped: torch.Tensor, documents: Documents | None, dealt: DealtTokens | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Return the softmax of scores over the keys that each query sees, and the shares of sinks, if heads have any.

        May overwrite the scores.
        """
        indices = None if dealt is None else dealt.indices
        starts = self.scores.first_seen(capped, documents, indices)
        if self.sinks is None:
            return (self.kernels.causal_softmax(capped, starts, indices),)
        return self.sinks.softmax(capped, starts, indices)


@dataclass
class Heads(Split):
    """[T, n/tp * 3 * d] -> queries, keys and values, views of [b, n/tp, s, d]. Backward copies their gradients once."""

    batch: int
    num_heads: int  # n/tp

    def forward(self, *ys: torch.Tensor) -> tuple[Tensors, Tensors]:
        (qkv,) = ys
        heads = qkv.view(self.batch, -1, self.num_heads, 3, qkv.shape[-1] // (3 * self.num_heads))
        return heads.permute(3, 0, 2, 1, 4).unbind(), ()

    def backward(self, grads: Sequence[torch.Tensor], kept: Tensors) -> Tensors:
        b, n, s, d = grads[0].shape
        return (torch.stack([part.transpose(1, 2) for part in grads], dim=3).view(b * s, n * 3 * d),)


def _matmul(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """a @ b, in `dtype`. 16-bit products on a CPU are computed in fp32, which is some 60 times faster."""
    product = a.float() @ b.float() if upcasts(a) else a @ b
    return product.to(dtype or a.dtype)


class _ExplicitAttention(torch.autograd.Function):
    """q [b, n/tp, t, d], k and v [b, g, t, d] -> [b, n/tp, t, d]"""

    @staticmethod
    def forward(ctx, q, k, v, core, rows, documents, dealt, keys, handle):
        groups = ctx.groups = q.shape[1] // k.shape[1]
        local = k, v
        k, v = keys.gather(k, v)
        capped = core.capped(q, _repeat(k, groups))
        kept = [capped.clone()] if core.scores.softcap else []
        weights, *shares = core.weights(capped, documents, dealt)
        again = local if keys.again else (k, v)
        ctx.save_for_backward(q, *again, *([] if core.recompute else kept or (weights, *shares)))
        ctx.core, ctx.rows, ctx.documents, ctx.dealt, ctx.keys = core, rows, documents, dealt, keys
        return _matmul(core.dropout(weights, rows), _repeat(v, groups))

    @staticmethod
    def backward(ctx, dy):
        core, keys, softcap = ctx.core, ctx.keys, ctx.core.scores.softcap > 0
        q, k, v, *kept = ctx.saved_tensors
        k, v = (_repeat(x, ctx.groups) for x in (keys.gather(k, v) if keys.again else (k, v)))
        saved = kept[0] if kept else core.capped(q, k)
        if softcap or not kept:
            kept = core.weights(saved.clone() if softcap else saved, ctx.documents, ctx.dealt)
        weights, *shares = kept
        dropped = core.dropout(weights, ctx.rows)
        dtype = keys.grad_dtype(k)
        dv = _sum_groups(_matmul(dropped.transpose(-1, -2), dy, dtype), ctx.groups)
        ddropped = _matmul(dy, v.transpose(-1, -2))
        if core.sinks is not None:
            core.sinks.add_grad(shares[0], (dropped * ddropped).sum(-1, dtype=shares[0].dtype))
        dscores = core.kernels.scores_grad(weights, dropped, ddropped, core.scores.factor(q.shape[-1]))
        if softcap:
            dscores = core.scores.uncap_grad_(dscores, saved)
        dk = _sum_groups(_matmul(dscores.transpose(-1, -2), q, dtype), ctx.groups)
        dk, dv = (x.to(q.dtype) for x in keys.reduce([(dk, dv)]))
        return _matmul(dscores, k), dk, dv, None, None, None, None, None, None


def _repeat(x: torch.Tensor, groups: int) -> torch.Tensor:
    """Keys or values per query head."""
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def _sum_groups(gradient: torch.Tensor, groups: int) -> torch.Tensor:
    return gradient if groups == 1 else gradient.unflatten(1, (-1, groups)).sum(2)


class Attention(nn.Module):
    """Causal self-attention; heads are sharded over tp.

    Attributes:
        score_flops: FLOPs per token of scores and sums over values, for all heads of the model.
        watch: called with this layer, its queries and keys, and the tokens, for statistics; None: no one asks.
    """

    columns: tuple[ColumnLinear, ...]
    proj: RowLinear
    watch: Callable[[Attention, Sequence[torch.Tensor], MicroBatchInfo], None] | None = None

    def __init__(self, model: ModelOptions, number: int, context: Context) -> None:
        super().__init__()
        self.context, self.number = context, number
        scores = Scores.of(model, number)
        widths = model.head_dim + model.value_dim
        self.score_flops = 2 * (scores.window or model.seq_length) * model.num_attention_heads * widths
        self.num_heads = model.num_attention_heads // context.tp.size
        self.first_head = context.tp.rank * self.num_heads
        dropout = context.dropout(model.attention_dropout, number, "scores")
        self.sinks = Sinks(model, context) if model.attention_sinks else None
        self.core = CoreAttention(
            dropout=dropout,
            kernels=context.kernels,
            recompute=context.selective,
            scores=scores,
            cp=context.cp,
            ring=context.ring,
            sinks=self.sinks,
        )

    def forward(self, x: torch.Tensor, norm: Norm, residual: Residual, tokens: MicroBatchInfo) -> torch.Tensor:
        """x [T', h] -> x + attention(norm(x)) [T', h]; `residual` joins them."""
        *heads, x = normed_columns(x, norm, self.columns, self.split(tokens))
        y = self.attend(heads, tokens)  # [T, n/tp * d]
        return rows_onto(x, (y,), ResidualRows((self.proj,), (None,), residual, tokens.dropout_rows))

    def split(self, tokens: MicroBatchInfo) -> Split:
        """Return the function from the outputs of `columns` to queries, keys and values."""
        raise NotImplementedError

    def attend(self, heads: list[torch.Tensor], tokens: MicroBatchInfo) -> torch.Tensor:
        """Queries [b, n/tp, t, d], keys and values [b, g, t, d] -> [T, n/tp * d]"""
        if self.watch is not None:
            self.watch(self, heads, tokens)
        if tokens.cache is not None:
            return tokens.cache.attend_heads(self, heads, tokens)
        rows, dealt = None, tokens.dealt
        if tokens.training and self.core.dropout.probability > 0:
            mine = range(self.first_head, self.first_head + self.num_heads)
            rows = score_rows(tokens.samples, mine, tokens.length, dealt)
        fused = self.is_fused(tokens, dealt)
        return self.core(*heads, fused=fused, rows=rows, documents=tokens.attention_documents, dealt=dealt)

    def is_fused(self, tokens: MicroBatchInfo, dealt: DealtTokens | None) -> bool:
        """Return whether a fused kernel computes the attention of queries that are `dealt`."""
        core = self.core
        return is_attention_fused(
            self.context.device.type,
            self.context.precision,
            dropout=tokens.training and core.dropout.probability > 0,
            documents=tokens.attention_documents is not None,
            softcap=core.scores.softcap > 0,
            log_sums=dealt is not None or core.sinks is not None,
        )


class FusedAttention(Attention):
    """GPT-2's: one weight for queries, keys and values; positions are added to embeddings, not here."""

    def __init__(self, model: ModelOptions, number: int, context: Context) -> None:
        super().__init__(model, number, context)
        h, n, d = model.hidden_size, model.num_attention_heads, model.head_dim
        std, biases = model.init_method_std, model.linear_biases
        self.qkv = ColumnLinear(context, h, n, 3, d, std=std, bias="qkv" in biases, matrices=(1,))
        self.proj = RowLinear(context, n * d, h, std=model.residual_std, bias="proj" in biases)
        self.columns = (self.qkv,)

    def split(self, tokens: MicroBatchInfo) -> Split:
        return Heads(len(tokens.samples), self.num_heads)


class GroupedAttention(Attention):
    """Groups of query heads share keys and values. Positions are rotary. q, k and v have biases if --add-qkv-bias.

    Queries are one weight [n, d, h]; keys and values another [groups, 2, d, h], sharded over tp by group. If there are
    fewer groups than ranks, it is replicated, and each rank computes with the group of its queries.

    With --qk-layernorm, queries and keys are normed before they are rotated: each head, or with --qk-norm-all-heads all
    heads of a token. If each head, they share the norms' weights, so a rank has the gradient of its heads only, and the
    ranks' gradients are summed.
    """

    def __init__(self, model: ModelOptions, number: int, context: Context) -> None:
        super().__init__(model, number, context)
        h, n, g, tp = model.hidden_size, model.num_attention_heads, model.query_groups, context.tp.size
        d, std, biases = model.head_dim, model.init_method_std, model.linear_biases
        bias = model.add_qkv_bias or "qkv" in biases
        self.tables = context.rotary_tables(Rotary.of(model, number), model.seq_length)
        group = self.first_head * g // n
        rows = slice(group, group + 1) if g < tp else None
        self.query = ColumnLinear(context, h, n, d, std=std, bias=bias)
        tp_dim = None if g < tp else 0
        self.kv = ColumnLinear(context, h, g, 2, d, std=std, bias=bias, tp_dim=tp_dim, rows=rows, matrices=(1,))
        self.norms: EachHead | AllHeads | tuple[()] = ()
        if model.qk_norm_all_heads:
            self.norms = AllHeads(HeadsWeight(model, context, n), HeadsWeight(model, context, g, rows))
        elif model.qk_layernorm:
            norm = NORMS[model.norm]
            self.norms = EachHead(*(norm(model, context, d, summed=("tp",)) for _ in range(2)))
        if self.norms:
            self.query_norm, self.key_norm = self.norms
        self.proj = RowLinear(context, n * d, h, std=model.residual_std, bias="proj" in biases)
        self.columns = (self.query, self.kv)

    def split(self, tokens: MicroBatchInfo) -> Split:
        return Groups(
            batch=len(tokens.samples),
            num_heads=self.num_heads,
            norms=self.norms,
            rotary=self.context.kernels.rotary,
            tables=self.tables,
            positions=tokens.head_positions,
        )


@dataclass
class Groups(Split):
    """[T, n/tp * d], [T, g * 2 * d] -> queries [b, n/tp, s, d], keys and values [b, g, s, d], rotated by position.

    Queries, keys and values are copies, because a view of one would keep the memory of all alive. In memory they are
    [b, s, heads, d], and so is the output that the fused kernels make of them. Backward rotates back, so only the
    norms' inputs and statistics are saved. Other outputs pass through.
    """

    batch: int
    num_heads: int  # n/tp
    rotary: Callable[..., None]  # see `Kernels`
    tables: RotaryTables
    positions: torch.Tensor | None  # [b, s]; None: 0 to s - 1 in every sample
    norms: EachHead | AllHeads | tuple[()] = ()  # for queries and keys, before rotation

    def forward(self, *ys: torch.Tensor) -> tuple[Tensors, Tensors]:
        query, kv, *others = ys
        d, kept = query.shape[-1] // self.num_heads, ()
        q = query.view(self.batch, -1, self.num_heads, d)
        k, v = kv.view(self.batch, q.shape[1], -1, 2, d).unbind(3)
        if self.norms:
            (q, k), kept = self.norms.forward(q, k.contiguous())  # a view of keys would keep the values' memory
        heads = tuple([torch.empty_like(part, memory_format=torch.contiguous_format) for part in (q, k, v)])
        self.rotary((q, k, v), heads, self.tables, self.positions, False)
        return (*[part.transpose(1, 2) for part in heads], *others), kept

    def backward(self, grads: Sequence[torch.Tensor], kept: Tensors) -> Tensors:
        dq, dk, dv = (part.transpose(1, 2) for part in grads[:3])  # [b, s, heads, d]
        b, s, g, d = dk.shape
        dquery, dkv = torch.empty_like(dq, memory_format=torch.contiguous_format), dk.new_empty(b, s, g, 2, d)
        dkey, dvalue = dkv.unbind(3)
        rotated_back = dkey if not self.norms else torch.empty_like(dkey, memory_format=torch.contiguous_format)
        self.rotary((dq, dk, dv), (dquery, rotated_back, dvalue), self.tables, self.positions, True)
        if self.norms:
            dquery, normed_back = self.norms.backward(dquery, rotated_back, kept)
            dkey.copy_(normed_back)
        return dquery.view(b * s, -1), dkv.view(b * s, -1), *grads[3:]
