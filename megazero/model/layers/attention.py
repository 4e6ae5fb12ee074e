"""Causal self-attention, and its core: attention of the heads that are on this rank, fused or explicit.

Fused: torch's scaled_dot_product_attention, which saves queries, keys, values, output and log-sum-exp per query.
Explicit: attention weights, [s, s] per head, which are saved for backward or recomputed (selective recompute). It is
used where the fused kernels are missing or slow:
- with dropout, whose masks depend on coordinates;
- in 16 bit on a CPU, where they are 8 times slower;
- in fp64 on a GPU, and with documents in fp32 on a GPU.

Both can restrict attention to documents. The fused kernels compute each document alone. That takes less time than
attention over whole samples, and the same memory.

Shapes: b micro-batch, s sequence, T = b s tokens, T' tokens of the residual stream on this rank, h hidden, n heads of
the model, n/tp heads of this rank, g groups of keys and values of this rank, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from megazero.config.schema import ModelConfig
from megazero.kernels.dropout import Dropout, Rows
from megazero.kernels.matmul import upcasts
from megazero.kernels.rotary import Rotary, RotaryTables
from megazero.kernels.table import Kernels
from megazero.model.layers.context import Context, MicroBatchInfo
from megazero.model.layers.documents import Documents, DocumentSpan
from megazero.model.layers.linear import (
    Call,
    ColumnLinear,
    Residual,
    RowLinear,
    Split,
    Tensors,
    normed_columns,
    rows_onto,
)
from megazero.model.layers.norm import Norm

FLASH_CAPABILITY = (8, 0)  # of a GPU: FlashAttention runs from Ampere on


@dataclass(frozen=True)
class CoreAttention:
    """The attention core of one layer."""

    dropout: Dropout
    kernels: Kernels
    recompute: bool  # compute explicit attention weights again in backward instead of saving them

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        fused: bool,
        rows: tuple[Rows, ...] | None,
        documents: Documents | None = None,
    ) -> torch.Tensor:
        """q [b, n/tp, s, d], k and v [b, g, s, d] -> [T, n/tp * d]

        Args:
            rows: numbers of the dropout mask's rows, one for each head and query; None without dropout.
            documents: restrict attention to these; None: to samples.
        """
        if not fused:
            y = _ExplicitAttention.apply(q, k, v, self, rows, documents)
        else:
            assert rows is None, "the fused kernels draw masks that depend on the layout"
            y = _fused_attention(q, k, v) if documents is None else _fused_within(q, k, v, documents)
        return y.transpose(1, 2).reshape(q.shape[0] * q.shape[2], -1)

    def weights(self, q: torch.Tensor, k: torch.Tensor, documents: Documents | None = None) -> torch.Tensor:
        """Causal softmax of q k^T / sqrt(d), [b, n/tp, s, s] in q's dtype.

        Queries are scaled, not scores, because q k^T alone can overflow in fp16.
        """
        scores = _matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2))
        return self.kernels.causal_softmax(scores, None if documents is None else documents.starts)


def _fused_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [b, n/tp, s, d], k and v [b, g, s, d] -> [b, n/tp, s, d]

    Meta tensors stand for a GPU's. torch would not choose a fused kernel for them, so the GPU's is called by name.
    """
    groups = q.shape[1] // k.shape[1]
    flash = q.dtype != torch.float32 and (q.is_meta or _has_flash(q.device))
    if groups > 1 and q.device.type != "cpu" and not flash:  # the memory-efficient kernel has no groups
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    if not q.is_meta:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    if q.dtype == torch.float32:
        return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True)[0]
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]


def _has_flash(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FLASH_CAPABILITY


def _fused_within(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents) -> torch.Tensor:
    """The same within documents: one FlashAttention for all of them on newer GPUs; elsewhere a call per document."""
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

    torch's kernel for CPUs, called per document. The outputs are parts of one tensor, which is saved once: as much as
    one call for whole samples saves. Calls under autograd would save each output and the joined tensor.
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


def _part(span: DocumentSpan) -> tuple[slice, slice, slice]:
    """Index the tokens of a document in [b, heads, s, ..]."""
    return slice(span.sample, span.sample + 1), slice(None), slice(span.first, span.stop)


class Heads(NamedTuple):
    """[T, n/tp * 3 * d] -> queries, keys and values, views of [b, n/tp, s, d]. Backward copies their gradients once."""

    batch: int
    num_heads: int  # n/tp
    norms = ()

    def forward(self, *ys: torch.Tensor) -> tuple[Tensors, Tensors]:
        (qkv,) = ys
        heads = qkv.view(self.batch, -1, self.num_heads, 3, qkv.shape[-1] // (3 * self.num_heads))
        return heads.permute(3, 0, 2, 1, 4).unbind(), ()

    def backward(self, grads: Sequence[torch.Tensor], kept: Tensors) -> Tensors:
        b, n, s, d = grads[0].shape
        return (torch.stack([part.transpose(1, 2) for part in grads], dim=3).view(b * s, n * 3 * d),)


def _matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b. 16-bit products on a CPU are computed in fp32, which is some 60 times faster."""
    if upcasts(a):
        return (a.float() @ b.float()).to(a.dtype)
    return a @ b


class _ExplicitAttention(torch.autograd.Function):
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
        dscores = core.kernels.scores_grad(weights, dropped, ddropped, q.shape[-1] ** -0.5)
        dk = _matmul(dscores.transpose(-1, -2), q)
        return _matmul(dscores, k), _sum_groups(dk, ctx.groups), _sum_groups(dv, ctx.groups), None, None, None


def _repeat(x: torch.Tensor, groups: int) -> torch.Tensor:
    """Keys or values per query head."""
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def _sum_groups(gradient: torch.Tensor, groups: int) -> torch.Tensor:
    return gradient if groups == 1 else gradient.unflatten(1, (-1, groups)).sum(2)


def is_fused(device_type: str, precision: str, dropout: bool, documents: bool = False) -> bool:
    """Return whether attention is computed by a fused kernel. `documents`: whether it is restricted to documents."""
    if device_type == "cpu":
        return not dropout and precision in ("fp32", "fp64")
    return not dropout and (precision in ("bf16", "fp16") or (precision == "fp32" and not documents))


class Attention(nn.Module):
    """Causal self-attention; heads are sharded over tp.

    Attributes:
        score_flops: FLOPs per token of scores and sums over values, for all heads of the model.
    """

    columns: tuple[ColumnLinear, ...]
    proj: RowLinear

    def __init__(self, model: ModelConfig, number: int, context: Context) -> None:
        super().__init__()
        self.context, self.number = context, number
        self.score_flops = 4 * model.seq_length * model.num_attention_heads * model.head_dim
        self.num_heads = model.num_attention_heads // context.tp.size
        self.first_head = context.tp.rank * self.num_heads
        dropout = context.dropout(model.attention_dropout, number, "scores")
        self.core = CoreAttention(dropout, context.kernels, context.selective)

    def forward(self, x: torch.Tensor, norm: Norm, residual: Residual, tokens: MicroBatchInfo) -> torch.Tensor:
        """x [T', h] -> x + attention(norm(x)) [T', h]; `residual` joins them."""
        *heads, x = normed_columns(x, norm, self.columns, self.split(tokens))
        y = self.attend(heads, tokens)  # [T, n/tp * d]
        return rows_onto(x, (y,), (self.proj,), (None,), residual, Call(tokens.dropout_rows, output=True))

    def split(self, tokens: MicroBatchInfo) -> Split:
        """Return the function from the outputs of `columns` to queries, keys and values.

        In generation, sequences have different numbers of new tokens. Then b is 1 and s is T: all sequences in one row.
        """
        raise NotImplementedError

    def attend(self, heads: list[torch.Tensor], tokens: MicroBatchInfo) -> torch.Tensor:
        """Queries [b, n/tp, s, d], keys and values [b, g, s, d] -> [T, n/tp * d]"""
        if tokens.cache is not None:
            new = (part[0].transpose(0, 1) for part in heads)
            return tokens.cache.attend(self.number, *new, tokens.rows)
        documents = tokens.attention_documents
        if tokens.training and self.core.dropout.probability > 0:
            first, count = self.first_head * tokens.length, self.num_heads * tokens.length
            rows = tuple(Rows(sample, first, count) for sample in tokens.samples)
        else:
            rows = None
        device, precision = self.context.device.type, self.context.precision
        fused = is_fused(device, precision, rows is not None, documents is not None)
        return self.core(*heads, fused, rows, documents)


class FusedAttention(Attention):
    """GPT-2's: one weight for queries, keys and values; biases; positions are added to embeddings, not here."""

    def __init__(self, model: ModelConfig, number: int, context: Context) -> None:
        super().__init__(model, number, context)
        h, n, d = model.hidden_size, model.num_attention_heads, model.head_dim
        self.qkv = ColumnLinear(context, h, n, 3, d, std=model.init_method_std, bias=True)
        self.proj = RowLinear(context, n * d, h, std=model.residual_std, bias=True)
        self.columns = (self.qkv,)

    def split(self, tokens: MicroBatchInfo) -> Split:
        return Heads(len(tokens.samples) if tokens.cache is None else 1, self.num_heads)


class GroupedAttention(Attention):
    """Groups of query heads share keys and values. Positions are rotary. q, k and v have biases if --add-qkv-bias.

    Queries are one weight [n, d, h]; keys and values another [groups, 2, d, h], sharded over tp by group. If there are
    fewer groups than ranks, it is replicated, and each rank computes with the group of its queries.

    With --qk-layernorm, each head of queries and keys is normed before it is rotated. All heads share the norms'
    weights, so a rank has the gradient of its heads only, and the ranks' gradients are summed.

    Args:
        norm: class of these norms.
    """

    def __init__(self, model: ModelConfig, number: int, context: Context, norm: type[Norm]) -> None:
        super().__init__(model, number, context)
        h, n, g, tp = model.hidden_size, model.num_attention_heads, model.query_groups, context.tp.size
        d, std, biases = model.head_dim, model.init_method_std, model.traits.biases
        bias = model.add_qkv_bias or "qkv" in biases
        rotary = Rotary(d, model.rotary_base, model.rope_scaling_factor)
        self.tables = context.rotary_tables(rotary, model.seq_length)
        group = self.first_head * g // n
        rows = slice(group, group + 1) if g < tp else None
        self.query = ColumnLinear(context, h, n, d, std=std, bias=bias)
        self.kv = ColumnLinear(context, h, g, 2, d, std=std, bias=bias, tp_dim=None if g < tp else 0, rows=rows)
        self.norms: tuple[Norm, ...] = ()
        if model.qk_layernorm:
            self.query_norm, self.key_norm = (norm(model, context, d, summed=("tp",)) for _ in range(2))
            self.norms = self.query_norm, self.key_norm
        self.proj = RowLinear(context, n * d, h, std=model.residual_std, bias="proj" in biases)
        self.columns = (self.query, self.kv)

    def split(self, tokens: MicroBatchInfo) -> Split:
        batch, positions = len(tokens.samples), None
        if tokens.cache is not None:
            batch, positions = 1, tokens.positions(self.context.device)[None]
        elif tokens.position_documents is not None:
            positions = tokens.position_documents.positions
        return Groups(batch, self.num_heads, self.norms, self.context.kernels.rotary, self.tables, positions)


class Groups(NamedTuple):
    """[T, n/tp * d], [T, g * 2 * d] -> queries [b, n/tp, s, d], keys and values [b, g, s, d], rotated by position.

    Queries, keys and values are copies, because a view of one would keep the memory of all alive. In memory they are
    [b, s, heads, d], and so is the output that the fused kernels make of them. Backward rotates back, so only the
    norms' inputs and statistics are saved. Other outputs pass through.
    """

    batch: int
    num_heads: int  # n/tp
    norms: tuple[Norm, ...]  # of a head's queries and of its keys, before rotation; () without
    rotary: Callable[..., None]  # see `Kernels`
    tables: RotaryTables
    positions: torch.Tensor | None  # [b, s]; None: 0 to s - 1 in every sample

    def forward(self, *ys: torch.Tensor) -> tuple[Tensors, Tensors]:
        query, kv, *others = ys
        d, kept = query.shape[-1] // self.num_heads, []
        q = query.view(self.batch, -1, self.num_heads, d)
        parts = [q, *kv.view(self.batch, q.shape[1], -1, 2, d).unbind(3)]
        for i, norm in enumerate(self.norms):
            x = parts[i].contiguous()  # of keys a copy, because a view would keep the values' memory
            y, *statistics = norm.normalise(x.view(-1, d))
            parts[i] = y.view_as(x)
            kept += [x.view(-1, d), *statistics]
        heads = [torch.empty_like(part, memory_format=torch.contiguous_format) for part in parts]
        self.rotary(tuple(parts), tuple(heads), self.tables, self.positions, False)
        return (*[part.transpose(1, 2) for part in heads], *others), tuple(kept)

    def backward(self, grads: Sequence[torch.Tensor], kept: Tensors) -> Tensors:
        dq, dk, dv = (part.transpose(1, 2) for part in grads[:3])  # [b, s, heads, d]
        b, s, g, d = dk.shape
        dquery, dkv = torch.empty_like(dq, memory_format=torch.contiguous_format), dk.new_empty(b, s, g, 2, d)
        dkey, dvalue = dkv.unbind(3)
        rotated_back = dkey if not self.norms else torch.empty_like(dkey, memory_format=torch.contiguous_format)
        self.rotary((dq, dk, dv), (dquery, rotated_back, dvalue), self.tables, self.positions, True)
        if self.norms:
            (query_norm, key_norm), half = self.norms, len(kept) // 2
            dquery = query_norm.input_grad(dquery.view(-1, d), None, *kept[:half])
            dkey.copy_(key_norm.input_grad(rotated_back.view(-1, d), None, *kept[half:]).view_as(dkey))
        return dquery.view(b * s, -1), dkv.view(b * s, -1), *grads[3:]
