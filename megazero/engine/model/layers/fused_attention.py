"""Attention by torch's fused kernels, which save queries, keys, values, output and log-sum-exp per query.

Documents, windows and context parallelism divide attention into pieces: a piece is a range of queries, and the keys
that they see. FlashAttention on newer GPUs has all pieces of whole samples in one call. Elsewhere each piece is a call,
which takes less time than attention over whole samples, and saves the same memory on a CPU. On GPUs without
FlashAttention, outputs are saved twice, and a window's mask is saved with each layer, 5/16 of the window squared; with
context parallelism, these have explicit attention.

Shapes: b micro-batch, s tokens of a sample, t those of a sample on this rank, n/tp heads of this rank, g groups of keys
and values of this rank, d head dim.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from megazero import torch_private
from megazero.engine.kernels.eager import wide
from megazero.engine.model.context_parallel.dealt import DealtTokens
from megazero.engine.model.context_parallel.key_exchange import AllKeys, Pair
from megazero.engine.model.context_parallel.pieces import CpuKernel, FlashKernel, merge_, parts, pieces_of, window_mask
from megazero.engine.model.documents import Documents
from megazero.engine.model.layers.sinks import Sinks
from megazero.engine.model.scores import Scores

FLASH_CAPABILITY = (8, 0)  # least compute capability: FlashAttention runs from Ampere on


def is_attention_fused(
    device_type: str,
    precision: str,
    dropout: bool,
    documents: bool = False,
    softcap: bool = False,
    log_sums: bool = False,
) -> bool:
    """Return whether attention is computed by a fused kernel.

    Args:
        documents: attention is restricted to documents.
        log_sums: they are needed: this rank has a part of a sample's tokens, or heads have sinks.
    """
    if dropout or softcap:
        return False
    if device_type == "cpu":
        return precision in ("fp32", "fp64")
    if log_sums and device_type == "cuda" and torch.cuda.get_device_capability() < FLASH_CAPABILITY:
        return False
    return precision in ("bf16", "fp16") or (precision == "fp32" and not documents and not log_sums)


def fused_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scores: Scores,
    documents: Documents | None,
    dealt: DealtTokens | None,
    keys: AllKeys,
    sinks: Sinks | None = None,
) -> torch.Tensor:
    """q [b, n/tp, t, d], k and v [b, g, t, d] -> [b, n/tp, t, d]"""
    on_cpu, length = q.device.type == "cpu", q.shape[2] if dealt is None else dealt.length
    whole = dealt is None and sinks is None  # torch's public functions compute it
    if whole:
        if documents is None and not scores.window:
            return _kernel(q, k, v, scores)
        if not on_cpu and _is_flash(q):
            return _flash_pieces(q, k, v, scores=scores, documents=documents)
    pieces = list(pieces_of(documents, length, scores.window, dealt, chunks=on_cpu or whole))
    if on_cpu or not whole:
        blocks = enumerate(keys.tokens(len(q), length))
        steps = [list(parts(pieces, tokens, step == 0, not on_cpu)) for step, tokens in blocks]
        handle = None if sinks is None else sinks.weight.handle
        return _PiecewiseAttention.apply(q, k, v, scores, steps, keys, sinks, handle)
    mask = window_mask(q, scores.window)
    found = [
        _kernel(q[p.queries], k[p.keys], v[p.keys], scores=scores, mask=p.of(mask)).transpose(1, 2) for p in pieces
    ]
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
        return torch_private.TRACED_FLASH_ATTENTION(q, k, v, 0.0, True, scale=scale)[0]
    bias = None if mask is None else mask.expand(*q.shape[:2], *mask.shape)
    causal = mask is None
    return torch_private.TRACED_EFFICIENT_ATTENTION(q, k, v, bias, True, 0.0, causal, scale=scale)[0]


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
    y = varlen_attn(*parts, *limits, scale=scale, window_size=window, **torch_private.grouped(varlen_attn))
    return y.view(b, s, n, d).transpose(1, 2)


class _PiecewiseAttention(torch.autograd.Function):
    """q [b, n/tp, t, d], k and v [b, g, t, d] -> [b, n/tp, t, d], in memory [b, t, n/tp, d].

    A kernel is called per part. The outputs are written into one tensor, which is saved once: as much as one call for
    whole samples saves. Calls under autograd would save each output and the joined tensor. Outputs of the same queries
    are merged by their log-sum-exp, and then with the sinks.

    `steps`: the parts of attention to each block of keys.
    """

    @staticmethod
    def forward(ctx, q, k, v, scores, steps, keys, sinks, handle):
        b, n, t, d = q.shape
        held, kernel = keys.gather(k, v), _piece_kernel(q, scores)
        merges = keys.merges or not kernel.joined
        y = q.new_empty(b, t, n, d, dtype=wide(q) if merges else q.dtype).transpose(1, 2)
        log_sums = q.new_empty(b, t, n, dtype=wide(q)).transpose(1, 2)
        for step, block in zip(steps, keys.blocks(*held), strict=True):
            for part in step:
                queries = part.piece.queries
                found = kernel.forward(part, q[queries], *(x[part.keys] for x in block))
                if part.own:
                    y[queries], log_sums[queries] = found
                else:
                    merge_(y[queries], log_sums[queries], *found)
        if sinks is not None:
            sinks.join_(y, log_sums)
        y = y.to(q.dtype)
        ctx.save_for_backward(q, *((k, v) if keys.again else held), y, log_sums)
        ctx.scores, ctx.steps, ctx.keys, ctx.sinks = scores, steps, keys, sinks
        return y

    @staticmethod
    def backward(ctx, dy):
        q, k, v, *results = ctx.saved_tensors
        keys, kernel = ctx.keys, _piece_kernel(q, ctx.scores)
        if ctx.sinks is not None:
            y, log_sums = results
            ctx.sinks.add_grad(ctx.sinks.shares(log_sums), (dy.to(log_sums.dtype) * y).sum(-1))
        dq = torch.empty_like(q, dtype=wide(q) if keys.merges or not kernel.joined else q.dtype)

        def gradients() -> Iterator[Pair]:
            held = keys.gather(k, v) if keys.again else (k, v)
            for step, block in zip(ctx.steps, keys.blocks(*held), strict=True):
                dk, dv = (torch.zeros_like(x, dtype=keys.grad_dtype(x)) for x in block)
                for part in step:
                    queries = part.piece.queries
                    own = q[queries], *(x[part.keys] for x in block), *(x[queries] for x in results)
                    found = kernel.backward(part, dy[queries], *own)
                    if part.own:
                        dq[queries] = found[0]
                    else:
                        dq[queries] += found[0]
                    dk[part.keys] += found[1]  # pieces share keys
                    dv[part.keys] += found[2]
                yield dk, dv

        dk, dv = keys.reduce(gradients())
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None, None, None, None, None


def _piece_kernel(q: torch.Tensor, scores: Scores) -> CpuKernel | FlashKernel:
    """Return the kernel of a pass. It is not kept between passes, because a window's mask is large."""
    return CpuKernel(q, scores) if q.device.type == "cpu" else FlashKernel(scores)
