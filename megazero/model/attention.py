"""Causal self-attention, and its core: attention of the heads that are on this rank, by one of two backends.

FUSED: torch's scaled_dot_product_attention, which saves queries, keys, values, output and log-sum-exp per query.
MATH: explicit attention weights, for what the fused kernels cannot do here: dropout with masks by coordinate; 16 bit
on a CPU, where they are 8 times slower; fp64 on a GPU, which has none; documents in fp32 on a GPU. It saves the
weights, [s, s] per head, for backward, or recomputes them (selective recompute).

Either bounds attention by documents, if told to. FUSED computes each document alone, which takes less time than whole
samples and as much memory.

Shapes: b micro-batch, s sequence, T = b s tokens, n heads, d head dim; /tp = this rank's part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from megazero.config.schema import ModelConfig
from megazero.model.context import Context, MicroBatchInfo
from megazero.model.documents import Documents, Span
from megazero.model.dropout import Dropout, Rows
from megazero.model.fused_ops import FusedOps
from megazero.model.linear import Call, ColumnLinear, RowLinear, Split, normed_columns, rows_onto
from megazero.model.matmul import upcasts
from megazero.model.norm import Norm
from megazero.model.rotary import Rotary, RotaryTables, rotate

FLASH_CAPABILITY = (8, 0)  # of a GPU: FlashAttention runs from Ampere on


@dataclass(frozen=True)
class CoreAttention:
    """The attention core of one layer.

    Attributes:
        recompute: compute the attention weights of the math backend again in backward, instead of saving them.
    """

    dropout: Dropout
    fused_ops: FusedOps
    recompute: bool

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        backend: Backend,
        rows: tuple[Rows, ...] | None,
        documents: Documents | None = None,
    ) -> torch.Tensor:
        """q [b, n/tp, s, d], k and v [b, g, s, d], g dividing n/tp -> [T, n/tp * d].

        Args:
            rows: of the dropout's mask, a row for every head and query; None without dropout.
            documents: what attention is bounded by; None: samples.
        """
        if backend is Backend.MATH:
            y = _MathAttention.apply(q, k, v, self, rows, documents)
        else:
            assert rows is None, "the fused kernels draw masks that depend on the layout"
            y = _fused_attention(q, k, v) if documents is None else _fused_within(q, k, v, documents)
        return y.transpose(1, 2).reshape(q.shape[0] * q.shape[2], -1)

    def weights(self, q: torch.Tensor, k: torch.Tensor, documents: Documents | None = None) -> torch.Tensor:
        """Causal softmax of q k^T / sqrt(d): [b, n/tp, s, s] in q's dtype, the softmax in fp32, or of fp64 in fp64.

        Queries are scaled, not scores: q k^T alone can be more than fp16 holds.
        """
        scores = _matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2))
        return self.fused_ops.causal_softmax(scores, None if documents is None else documents.starts)


def _fused_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [b, n/tp, s, d], k and v [b, g, s, d] -> [b, n/tp, s, d]

    For meta tensors, which stand for a GPU's, torch would choose no fused kernel; so the one that a GPU takes is named.
    """
    groups = q.shape[1] // k.shape[1]
    flash = q.dtype != torch.float32 and (q.is_meta or _has_flash(q.device))
    if groups > 1 and q.device.type != "cpu" and not flash:  # the other kernel has no groups
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    if not q.is_meta:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    if q.dtype == torch.float32:
        return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True)[0]
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]


def _has_flash(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FLASH_CAPABILITY


def _fused_within(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents) -> torch.Tensor:
    """The same, within documents. On a GPU, in 16 bit, one kernel has them all; on a CPU each has a call.

    That kernel is FlashAttention, which older GPUs do not run: each document has a call there too.
    """
    if q.device.type == "cpu":
        return _DocumentAttention.apply(q, k, v, documents)
    b, n, s, d = q.shape
    if not (q.is_meta or _has_flash(q.device)):
        each = [_fused_attention(*(x[_part(span)] for x in (q, k, v))).transpose(1, 2) for span in documents.spans]
        return torch.cat(each, dim=1).view(b, s, n, d).transpose(1, 2)
    from torch.nn.attention.varlen import varlen_attn

    parts = (x.transpose(1, 2).reshape(b * s, -1, d) for x in (q, k, v))
    limits = documents.bounds, documents.bounds, documents.longest, documents.longest
    y = varlen_attn(*parts, *limits, window_size=(-1, 0), enable_gqa=n != k.shape[1])
    return y.view(b, s, n, d).transpose(1, 2)


class _DocumentAttention(torch.autograd.Function):
    """q [b, n/tp, s, d], k and v [b, g, s, d] -> [b, n/tp, s, d], in memory [b, s, n/tp, d].

    torch's kernel for CPUs, called for each document. It keeps what one call for whole samples keeps: slices of
    autograd's own calls would keep their outputs beside the tensor that they are joined in.
    """

    @staticmethod
    def forward(ctx, q, k, v, documents):
        b, n, s, d = q.shape
        y = q.new_empty(b, s, n, d).transpose(1, 2)
        log_sums = q.new_empty(b, s, n).transpose(1, 2)
        for span in documents.spans:
            part = _part(span)
            y[part], log_sums[part] = _CPU_KERNEL(q[part], k[part], v[part], 0.0, True)
        ctx.save_for_backward(q, k, v, y, log_sums)
        ctx.documents = documents
        return y

    @staticmethod
    def backward(ctx, dy):
        *inputs, y, log_sums = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in inputs]
        for span in ctx.documents.spans:
            part = _part(span)
            own = [x[part] for x in inputs]
            found = _CPU_KERNEL_BACKWARD(dy[part], *own, y[part], log_sums[part], 0.0, True)
            for into, grad in zip(grads, found, strict=True):
                into[part] = grad
        return *grads, None


_CPU_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_KERNEL_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _part(span: Span) -> tuple[slice, slice, slice]:
    """Index the tokens of a document in [b, heads, s, ..]."""
    return slice(span.sample, span.sample + 1), slice(None), slice(span.first, span.stop)


class Heads(NamedTuple):
    """[T, n/tp * 3 * d] -> queries, keys and values, views of [b, n/tp, s, d]. Their gradients are copied into one
    tensor, once: autograd's own way is a stack and then a copy into rows.
    """

    batch: int
    num_heads: int  # n/tp

    def forward(self, *ys: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (qkv,) = ys
        heads = qkv.view(self.batch, -1, self.num_heads, 3, qkv.shape[-1] // (3 * self.num_heads))
        return heads.permute(3, 0, 2, 1, 4).unbind()

    def backward(self, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        b, n, s, d = grads[0].shape
        return (torch.stack([part.transpose(1, 2) for part in grads], dim=3).view(b * s, n * 3 * d),)


def _matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b; in 16 bit on a CPU by way of fp32, which is some 60 times faster there."""
    if upcasts(a):
        return (a.float() @ b.float()).to(a.dtype)
    return a @ b


class _MathAttention(torch.autograd.Function):
    """q [b, n/tp, s, d], k and v [b, g, s, d] -> [b, n/tp, s, d]"""

    @staticmethod
    def forward(ctx, q, k, v, core, rows, documents):
        groups = ctx.groups = q.shape[1] // k.shape[1]
        weights = core.weights(q, _repeat(k, groups), documents)
        ctx.save_for_backward(q, k, v, *(() if core.recompute else (weights,)))
        ctx.core, ctx.rows, ctx.documents = core, rows, documents
        return _matmul(core.dropout(weights, rows), _repeat(v, groups))

    @staticmethod
    def backward(ctx, dy):
        core = ctx.core
        q, k, v, *kept = ctx.saved_tensors
        k, v = _repeat(k, ctx.groups), _repeat(v, ctx.groups)
        weights = kept[0] if kept else core.weights(q, k, ctx.documents)
        dropped = core.dropout(weights, ctx.rows)
        dv = _matmul(dropped.transpose(-1, -2), dy)
        ddropped = _matmul(dy, v.transpose(-1, -2))
        dscores = core.fused_ops.scores_grad(weights, dropped, ddropped, q.shape[-1] ** -0.5)
        dk = _matmul(dscores.transpose(-1, -2), q)
        return _matmul(dscores, k), _sum_groups(dk, ctx.groups), _sum_groups(dv, ctx.groups), None, None, None


def _repeat(x: torch.Tensor, groups: int) -> torch.Tensor:
    """Keys or values of every query's head."""
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def _sum_groups(gradient: torch.Tensor, groups: int) -> torch.Tensor:
    return gradient if groups == 1 else gradient.unflatten(1, (-1, groups)).sum(2)


class Backend(Enum):
    """Autograd function of the attention core: see `attention`."""

    FUSED = "fused"  # saves the log-sum-exp per query
    MATH = "math"  # saves the attention weights


def attention_backend(device_type: str, precision: str, dropout: bool, documents: bool = False) -> Backend:
    """Choose the backend.

    Args:
        dropout: in training with --attention-dropout.
        documents: attention is bounded by documents.
    """
    fused = ("fp32", "fp64") if device_type == "cpu" else ("bf16", "fp16", *(() if documents else ("fp32",)))
    return Backend.MATH if dropout or precision not in fused else Backend.FUSED


class _Attention(nn.Module):
    """Causal self-attention; heads are sharded over tp.

    Attributes:
        head_dim: d, the model's unless another is given.
        score_flops: FLOPs per token of scores and of sums over values, of all heads.
    """

    columns: tuple[ColumnLinear, ...]
    proj: RowLinear

    def __init__(self, model: ModelConfig, number: int, context: Context, head_dim: int | None = None) -> None:
        super().__init__()
        self.context, self.number, self.head_dim = context, number, head_dim or model.head_dim
        self.score_flops = 4 * model.seq_length * model.num_attention_heads * self.head_dim
        self.num_heads = model.num_attention_heads // context.tp.size
        self.first_head = context.tp.rank * self.num_heads
        dropout = context.dropout(model.attention_dropout, number, "scores")
        self.core = CoreAttention(dropout, context.fused_ops, context.selective)

    def forward(self, x: torch.Tensor, norm: Norm, dropout: Dropout, tokens: MicroBatchInfo) -> torch.Tensor:
        """x [T', h] -> x + dropout(attention(norm(x))) [T', h]"""
        *heads, x = normed_columns(x, norm, self.columns, self.split(tokens))
        y = self.attend(heads, tokens)  # [T, n/tp * d]
        return rows_onto(x, (y,), (self.proj,), (None,), dropout, Call(tokens.dropout_rows, output=True))

    def split(self, tokens: MicroBatchInfo) -> Split | None:
        """Return the split of the outputs of `columns` that `attend` takes."""
        raise NotImplementedError

    def new_heads(self, outputs: list[torch.Tensor], tokens: MicroBatchInfo) -> tuple[torch.Tensor, ...]:
        """Return queries [T, n/tp, d], keys and values [T, g, d] of new tokens, of the outputs of `columns`."""
        raise NotImplementedError

    def attend(self, heads: list[torch.Tensor], tokens: MicroBatchInfo) -> torch.Tensor:
        """Queries, keys and values -> [T, n/tp * d]"""
        if tokens.cache is not None:
            return tokens.cache.attend(self.number, *self.new_heads(heads, tokens), tokens.rows)
        documents = tokens.attention_documents
        if tokens.training and self.core.dropout.probability > 0:
            first, count = self.first_head * tokens.length, self.num_heads * tokens.length
            rows = tuple(Rows(sample, first, count) for sample in tokens.samples)
        else:
            rows = None
        backend = attention_backend(
            heads[0].device.type, self.context.precision, rows is not None, documents is not None
        )
        return self.core(*heads, backend, rows, documents)


class Attention(_Attention):
    """One weight has queries, keys and values of every head; with biases. Positions are learned elsewhere."""

    def __init__(self, model: ModelConfig, number: int, context: Context, head_dim: int | None = None) -> None:
        super().__init__(model, number, context, head_dim)
        h, n, d = model.hidden_size, model.num_attention_heads, self.head_dim
        self.qkv = ColumnLinear(context, h, n, 3, d, std=model.init_method_std, bias=True)
        self.proj = RowLinear(context, n * d, h, std=model.residual_std, bias=True)
        self.columns = (self.qkv,)

    def split(self, tokens: MicroBatchInfo) -> Split | None:
        return Heads(len(tokens.samples), self.num_heads) if tokens.cache is None else None

    def new_heads(self, outputs: list[torch.Tensor], tokens: MicroBatchInfo) -> tuple[torch.Tensor, ...]:
        (qkv,) = outputs
        return qkv.view(len(qkv), self.num_heads, 3, -1).unbind(2)


class GroupedAttention(_Attention):
    """Groups of query heads share keys and values; positions are rotary; no biases but, if asked for, of q, k and v.

    Queries are one weight [n, d, h]; keys and values another [g, 2, d, h], sharded over tp by group. Where there are
    fewer groups than ranks, it is replicated, and each rank computes with the group of its queries.
    """

    def __init__(self, model: ModelConfig, number: int, context: Context, head_dim: int | None = None) -> None:
        super().__init__(model, number, context, head_dim)
        h, n, g, tp = model.hidden_size, model.num_attention_heads, model.query_groups, context.tp.size
        d, std, bias = self.head_dim, model.init_method_std, model.add_qkv_bias
        rotary = Rotary(d, model.rotary_base, model.rope_scaling_factor)
        self.tables = context.rotary_tables(rotary, model.seq_length)
        group = self.first_head * g // n
        rows = slice(group, group + 1) if g < tp else None
        self.query = ColumnLinear(context, h, n, d, std=std, bias=bias)
        self.kv = ColumnLinear(context, h, g, 2, d, std=std, bias=bias, tp_dim=None if g < tp else 0, rows=rows)
        self.proj = RowLinear(context, n * d, h, std=model.residual_std, bias=False)
        self.columns = (self.query, self.kv)

    def split(self, tokens: MicroBatchInfo) -> Split | None:
        if tokens.cache is not None:
            return None
        positions = None if tokens.position_documents is None else tokens.position_documents.positions
        return Groups(len(tokens.samples), self.num_heads, self.context.kernels.rotary, self.tables, positions)

    def new_heads(self, outputs: list[torch.Tensor], tokens: MicroBatchInfo) -> tuple[torch.Tensor, ...]:
        query, kv = outputs
        q = query.view(1, len(query), self.num_heads, -1)
        k, v = kv.view(1, len(kv), -1, 2, q.shape[-1]).unbind(3)
        tables = self.tables.at(tokens.positions(q.device), len(query))
        return rotate(q, tables)[0], rotate(k, tables)[0], v[0]


class Groups(NamedTuple):
    """[T, n/tp * d], [T, g * 2 * d] -> queries [b, n/tp, s, d], keys and values [b, g, s, d], rotated by position.

    They are tensors of their own, since a view of one would keep the memory of all; in memory [b, s, heads, d], as the
    fused kernels' output then is. Nothing is kept: a rotation is undone by rotating back. Other outputs pass through.
    """

    batch: int
    num_heads: int  # n/tp
    rotary: Callable[..., None]  # see `Kernels`
    tables: RotaryTables
    positions: torch.Tensor | None  # [b, s]; None: 0 to s - 1 in every sample

    def forward(self, *ys: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, kv, *others = ys
        d = query.shape[-1] // self.num_heads
        q = query.view(self.batch, -1, self.num_heads, d)
        k, v = kv.view(self.batch, q.shape[1], -1, 2, d).unbind(3)
        heads = tuple([torch.empty_like(part, memory_format=torch.contiguous_format) for part in (q, k, v)])
        self.rotary((q, k, v), heads, self.tables, self.positions, False)
        return *[part.transpose(1, 2) for part in heads], *others

    def backward(self, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        dq, dk, dv = (part.transpose(1, 2) for part in grads[:3])  # [b, s, heads, d]
        b, s, g, d = dk.shape
        dquery, dkv = torch.empty_like(dq, memory_format=torch.contiguous_format), dk.new_empty(b, s, g, 2, d)
        self.rotary((dq, dk, dv), (dquery, *dkv.unbind(3)), self.tables, self.positions, True)
        return dquery.view(b * s, -1), dkv.view(b * s, -1), *grads[3:]
