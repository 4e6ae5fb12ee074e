"""The attention core: causal attention of heads that are on this rank, by one of two backends.

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
import torch.nn.functional as F

from megazero.model.dropout import Dropout, Rows
from megazero.model.fused_ops import FusedOps
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
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).reshape(qkv.shape[0], -1)

    def weights(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Causal softmax of q k^T / sqrt(d): [b, n/tp, s, s] in q's dtype, the softmax in fp32, or of fp64 in fp64.

        Queries are scaled, not scores: q k^T alone can be more than fp16 holds.
        """
        return self.fused_ops.causal_softmax(_matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2)))


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
