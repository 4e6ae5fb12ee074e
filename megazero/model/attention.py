"""Causal self-attention, and its core: attention of the heads that are on this rank, by one of two backends.

FUSED: torch's scaled_dot_product_attention, which saves queries, keys, values, output and log-sum-exp per query.
MATH: explicit attention weights, for what the fused kernels cannot do here: dropout with masks by coordinate; 16 bit
on a CPU, where they are 8 times slower; fp64 on a GPU, which has none. It saves the weights, [s, s] per head, for
backward, or recomputes them (selective recompute).

Shapes: b micro-batch, s sequence, T = b s tokens, n heads, d head dim; /tp = this rank's part.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn as nn
import torch.nn.functional as F

from megazero.config.schema import ModelConfig
from megazero.model.context import Context, MicroBatchInfo
from megazero.model.dropout import Dropout, Rows
from megazero.model.fused_ops import FusedOps
from megazero.model.linear import ColumnLinear, RowLinear
from megazero.model.matmul import upcasts


@dataclass(frozen=True)
class CoreAttention:
    """The attention core of one layer.

    Attributes:
        num_heads: n/tp.
        recompute: compute the attention weights of the math backend again in backward, instead of saving them.
    """

    num_heads: int
    dropout: Dropout
    fused_ops: FusedOps
    recompute: bool

    def __call__(self, qkv: torch.Tensor, batch: int, backend: Backend, rows: tuple[Rows, ...] | None) -> torch.Tensor:
        """[T, n/tp * 3 * d] -> [T, n/tp * d].

        Args:
            rows: of the dropout's mask, a row for every head and query; None without dropout.
        """
        q, k, v = _Heads.apply(qkv, batch, self.num_heads)
        if backend is Backend.MATH:
            y = _MathAttention.apply(q, k, v, self, rows)
        else:
            assert rows is None, "the fused kernels draw masks that depend on the layout"
            y = _fused_attention(q, k, v)
        return y.transpose(1, 2).reshape(qkv.shape[0], -1)

    def weights(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Causal softmax of q k^T / sqrt(d): [b, n/tp, s, s] in q's dtype, the softmax in fp32, or of fp64 in fp64.

        Queries are scaled, not scores: q k^T alone can be more than fp16 holds.
        """
        return self.fused_ops.causal_softmax(_matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2)))


def _fused_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q, k, v [b, n/tp, s, d] -> [b, n/tp, s, d]

    For meta tensors, which stand for a GPU's, torch would choose no fused kernel; so the one that a GPU takes is named.
    """
    if not q.is_meta:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    if q.dtype == torch.float32:
        return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True)[0]
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]


class _Heads(torch.autograd.Function):
    """[T, n/tp * 3 * d] -> queries, keys and values, views of [b, n/tp, s, d]. Their gradients are copied into one
    tensor, once: autograd's own way is a stack and then a copy into rows.
    """

    @staticmethod
    def forward(ctx, qkv, batch, num_heads):
        ctx.split = batch, -1, num_heads, 3, qkv.shape[-1] // (3 * num_heads)
        return tuple(part.transpose(1, 2) for part in qkv.view(ctx.split).unbind(3))

    @staticmethod
    def backward(ctx, dq, dk, dv):
        b, n, s, d = dq.shape
        grad = dq.new_empty(b * s, n * 3 * d)
        for part, into in zip((dq, dk, dv), grad.view(ctx.split).unbind(3), strict=True):
            into.copy_(part.transpose(1, 2))
        return grad, None, None


def _matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b; in 16 bit on a CPU by way of fp32, which is some 60 times faster there."""
    if upcasts(a):
        return (a.float() @ b.float()).to(a.dtype)
    return a @ b


class _MathAttention(torch.autograd.Function):
    """q, k, v [b, n/tp, s, d] -> [b, n/tp, s, d]"""

    @staticmethod
    def forward(ctx, q, k, v, core, rows):
        weights = core.weights(q, k)
        ctx.save_for_backward(q, k, v, *(() if core.recompute else (weights,)))
        ctx.core, ctx.rows = core, rows
        return _matmul(core.dropout(weights, rows), v)

    @staticmethod
    def backward(ctx, dy):
        core = ctx.core
        q, k, v, *kept = ctx.saved_tensors
        weights = kept[0] if kept else core.weights(q, k)
        dropped = core.dropout(weights, ctx.rows)
        dv = _matmul(dropped.transpose(-1, -2), dy)
        ddropped = _matmul(dy, v.transpose(-1, -2))
        dscores = core.fused_ops.scores_grad(weights, dropped, ddropped, q.shape[-1] ** -0.5)
        return _matmul(dscores, k), _matmul(dscores.transpose(-1, -2), q), dv, None, None


class Backend(Enum):
    """Autograd function of the attention core: see `attention`."""

    FUSED = "fused"  # saves the log-sum-exp per query
    MATH = "math"  # saves the attention weights


def attention_backend(device_type: str, precision: str, dropout: bool) -> Backend:
    """Choose the backend; `dropout`: in training with --attention-dropout."""
    fused = ("fp32", "fp64") if device_type == "cpu" else ("fp32", "bf16", "fp16")
    return Backend.MATH if dropout or precision not in fused else Backend.FUSED


class Attention(nn.Module):
    """Causal self-attention; heads are sharded over tp."""

    def __init__(self, model: ModelConfig, number: int, context: Context) -> None:
        super().__init__()
        h, n = model.hidden_size, model.num_attention_heads
        self.context = context
        self.num_heads = n // context.tp.size
        self.first_head = context.tp.rank * self.num_heads
        self.qkv = ColumnLinear(context, h, n, 3, h // n, std=model.init_method_std, bias=True)
        self.proj = RowLinear(context, h, h, std=model.residual_std, bias=True)
        dropout = Dropout(model.attention_dropout, context.seed, number, "scores")
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
