"""Attention by torch's fused kernels, which save queries, keys, values, output and log-sum-exp per query.

Documents and windows divide attention into pieces: a piece is a range of queries, and the keys that they see.
FlashAttention on newer GPUs has all pieces in one call. Elsewhere each piece is a call, which takes less time than
attention over whole samples, and saves the same memory on a CPU. On GPUs without FlashAttention, outputs are saved
twice, and a window's mask is saved with each layer, 5/16 of the window squared.

Shapes: b micro-batch, s sequence, n/tp heads of this rank, g groups of keys and values of this rank, d head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from megazero.model.layers.documents import Documents
from megazero.model.layers.scores import Scores

FLASH_CAPABILITY = (8, 0)  # of a GPU: FlashAttention runs from Ampere on
ALIGNMENT = 8  # elements of a mask's row that GPUs read together
LEAST_CHUNK = 64  # queries of a window's pieces: fewer cost more in calls than they save in masked keys


def is_fused(device_type: str, precision: str, dropout: bool, documents: bool = False, softcap: bool = False) -> bool:
    """Return whether attention is computed by a fused kernel. `documents`: whether it is restricted to documents."""
    if dropout or softcap:
        return False
    if device_type == "cpu":
        return precision in ("fp32", "fp64")
    return precision in ("bf16", "fp16") or (precision == "fp32" and not documents)


def fused_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores, documents: Documents | None
) -> torch.Tensor:
    """q [b, n/tp, s, d], k and v [b, g, s, d] -> [b, n/tp, s, d]"""
    if documents is None and not scores.window:
        return _kernel(q, k, v, scores)
    if q.device.type != "cpu" and _is_flash(q):
        return _flash_pieces(q, k, v, scores, documents)
    pieces = list(_pieces(documents, q.shape[2], scores.window))
    if q.device.type == "cpu":
        return _PiecewiseAttention.apply(q, k, v, scores, pieces)
    mask = _mask(q, scores.window)
    found = [_kernel(q[p.queries], k[p.keys], v[p.keys], scores, p.of(mask)).transpose(1, 2) for p in pieces]
    b, n, s, d = q.shape
    return torch.cat(found, dim=1).view(b, s, n, d).transpose(1, 2)


def _is_flash(q: torch.Tensor) -> bool:
    """Return whether FlashAttention computes it on a GPU. Meta tensors stand for a GPU's."""
    newer = q.is_meta or (q.is_cuda and torch.cuda.get_device_capability(q.device) >= FLASH_CAPABILITY)
    return q.dtype != torch.float32 and newer


def _kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Attend causally, or to the keys at which `mask`, which is added to scores, is 0.

    For meta tensors, torch would not choose a fused kernel, so the GPU's is called by name.
    """
    groups, scale = q.shape[1] // k.shape[1], scores.scale or None
    flash = q.device.type != "cpu" and mask is None and _is_flash(q)
    if groups > 1 and q.device.type != "cpu" and not flash:  # the memory-efficient kernel has no groups
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    if not q.is_meta:
        options = {"is_causal": mask is None, "enable_gqa": q.shape[1] != k.shape[1], "scale": scale}
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
    if flash:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=scale)[0]
    bias = None if mask is None else mask.expand(*q.shape[:2], *mask.shape)
    causal = mask is None
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal, scale=scale)[0]


def _flash_pieces(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores, documents: Documents | None
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    b, n, s, d = q.shape
    parts = (x.transpose(1, 2).reshape(b * s, -1, d) for x in (q, k, v))
    if documents is None:
        bounds, longest = torch.arange(0, b * s + 1, s, dtype=torch.int32, device=q.device), s
    else:
        bounds, longest = documents.bounds, documents.longest
    window, scale = (scores.window - 1, 0), scores.scale or None  # -1: no window
    limits = bounds, bounds, longest, longest
    y = varlen_attn(*parts, *limits, scale=scale, window_size=window, enable_gqa=n != k.shape[1])
    return y.view(b, s, n, d).transpose(1, 2)


class _Piece(NamedTuple):
    """The queries [first, stop) of some samples, which see keys of [seen, stop)."""

    samples: slice
    first: int
    stop: int
    seen: int

    @property
    def queries(self) -> tuple[slice, slice, slice]:
        """The index of its queries in [b, heads, s, ..]."""
        return self.samples, slice(None), slice(self.first, self.stop)

    @property
    def keys(self) -> tuple[slice, slice, slice]:
        return self.samples, slice(None), slice(self.seen, self.stop)

    def of(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Return its part of a window's mask; None if it is causal."""
        if self.seen == self.first:
            return None
        assert mask is not None
        return mask[: self.stop - self.first, : self.stop - self.seen]


def _chunk(window: int) -> int:
    return max(LEAST_CHUNK, window // 4)


def _pieces(documents: Documents | None, length: int, window: int) -> Iterator[_Piece]:
    """Yield a piece per document, or sample. Of a longer one than the window, the first piece is as long as that.

    Each of the others has `_chunk` queries, and the keys of a window before them, of which the first is always masked.
    """
    spans = [(slice(None), 0, length)]
    if documents is not None:
        spans = [(slice(span.sample, span.sample + 1), span.first, span.stop) for span in documents.spans]
    for samples, first, stop in spans:
        causal = min(first + window, stop) if window else stop
        yield _Piece(samples, first, causal, first)
        for at in range(causal, stop, _chunk(window)):
            yield _Piece(samples, at, min(at + _chunk(window), stop), at - window)


def _mask(like: torch.Tensor, window: int) -> torch.Tensor | None:
    """Return the mask of pieces that are not causal, [chunk, window + chunk]: 0 at keys that a query sees, or -inf.

    Rows are a multiple of ALIGNMENT long, because kernels of GPUs would copy others.
    """
    if not window:
        return None
    columns = -(-(window + _chunk(window)) // ALIGNMENT) * ALIGNMENT
    mask = like.new_full((_chunk(window), columns), -torch.inf)
    return mask.triu_(window + 1) + mask.new_full(mask.shape, -torch.inf).tril_()


class _PiecewiseAttention(torch.autograd.Function):
    """q [b, n/tp, s, d], k and v [b, g, s, d] -> [b, n/tp, s, d], in memory [b, s, n/tp, d].

    torch's kernel for CPUs, called per piece. The outputs are parts of one tensor, which is saved once: as much as
    one call for whole samples saves. Calls under autograd would save each output and the joined tensor.
    """

    @staticmethod
    def forward(ctx, q, k, v, scores, pieces):
        b, n, s, d = q.shape
        mask, options = _mask(q, scores.window), {"scale": scores.scale or None}
        y = q.new_empty(b, s, n, d).transpose(1, 2)
        log_sums = q.new_empty(b, s, n).transpose(1, 2)
        for piece in pieces:
            own, bias = (q[piece.queries], k[piece.keys], v[piece.keys]), piece.of(mask)
            found = _CPU_KERNEL(*own, 0.0, bias is None, attn_mask=bias, **options)
            y[piece.queries], log_sums[piece.queries] = found
        ctx.save_for_backward(q, k, v, y, log_sums)
        ctx.pieces, ctx.window, ctx.options = pieces, scores.window, options
        return y

    @staticmethod
    def backward(ctx, dy):
        q, k, v, *results = ctx.saved_tensors
        mask = _mask(dy, ctx.window)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for piece in ctx.pieces:
            queries, keys, bias = piece.queries, piece.keys, piece.of(mask)
            own = q[queries], k[keys], v[keys], *(x[queries] for x in results)
            found = _CPU_KERNEL_BACKWARD(dy[queries], *own, 0.0, bias is None, attn_mask=bias, **ctx.options)
            dq[queries] = found[0]
            dk[keys] += found[1]  # pieces of a window share keys
            dv[keys] += found[2]
        return dq, dk, dv, None, None


_CPU_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_KERNEL_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
