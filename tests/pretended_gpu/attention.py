"""Attention kernels of a GPU, computed by the CPU's. They save the same bytes for backward as a GPU's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tests.pretended_gpu.modes import Session

aten = torch.ops.aten


class _Attention(torch.autograd.Function):
    """q [b, n, s, d], k and v [b, g, L, d] -> [b, n, s, d], causal or with a mask [s, L] that is added to scores."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float | None
    ) -> torch.Tensor:
        causal = mask is None
        ctx.scale = scale
        y, log_sums = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
        given = (q, k, v) if causal else (q, k, v, mask.expand(*q.shape[:2], *mask.shape))
        metas = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in given]
        if q.dtype == torch.float32:
            bias = None if causal else metas[3]
            made = aten._scaled_dot_product_efficient_attention(*metas[:3], bias, True, 0.0, causal)
        else:
            made = aten._scaled_dot_product_flash_attention(*metas[:3], 0.0, True)
        _, sums, *others = (x for x in made if isinstance(x, torch.Tensor))
        padded = q.new_zeros(sums.shape, dtype=sums.dtype)
        padded[..., : q.shape[2]] = log_sums
        others = [q.new_empty(x.shape, dtype=x.dtype) for x in others]  # the state of a random generator
        ctx.save_for_backward(q, k, v, y, padded, mask, *others)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, y, padded, mask, *_ = ctx.saved_tensors
        log_sums = padded[..., : q.shape[2]].contiguous()
        given = dy, q, k, v, y, log_sums
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *given, 0.0, mask is None, attn_mask=mask, scale=ctx.scale
        )
        return *grads, None, None


def attention(otherwise: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a stand-in for `F.scaled_dot_product_attention`, which calls torch's own where there is no backward."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        mask = kwargs.get("attn_mask")
        known = not args and bool(kwargs.get("is_causal")) == (mask is None)
        if known and q.device.type == "cuda" and torch.is_grad_enabled() and q.dtype != torch.float64:
            return _Attention.apply(q, k, v, mask, kwargs.get("scale"))
        return otherwise(q, k, v, *args, **kwargs)

    return attend


def varlen_attention(session: Session, capability: tuple[int, int]) -> Callable[..., torch.Tensor]:
    """Return FlashAttention's kernel for documents of any length: a call of the CPU's kernel for each."""

    def attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        q_bounds: torch.Tensor,
        k_bounds: torch.Tensor,
        longest_q: int,
        longest_k: int,
        *,
        window_size: tuple[int, int],
        enable_gqa: bool,
        scale: float | None = None,
    ) -> torch.Tensor:
        if capability < (8, 0) or q.dtype not in (torch.float16, torch.bfloat16):
            raise RuntimeError("FlashAttention needs 16-bit tensors on an Ampere GPU or a newer one")
        before, after = window_size
        assert after == 0, "not causal"
        assert enable_gqa or q.shape[1] == k.shape[1]
        with session.pausing():
            documents = tuple(itertools.pairwise(q_bounds.tolist()))
        return _Varlen.apply(q, k, v, q_bounds, documents, before, scale)

    return attend


class _Varlen(torch.autograd.Function):
    """q [T, n, d], k and v [T, g, d] -> [T, n, d], within documents of the tokens [first, stop)."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bounds: torch.Tensor,
        documents: tuple[tuple[int, int], ...],
        before: int,
        scale: float | None,
    ) -> torch.Tensor:
        ctx.documents, ctx.before, ctx.scale = documents, before, scale
        y, log_sums = torch.empty_like(q), q.new_empty(q.shape[1], len(q), dtype=torch.float32)
        for first, stop in documents:
            parts, mask = _document((q, k, v), first, stop), _window(q, stop - first, before)
            found = aten._scaled_dot_product_flash_attention_for_cpu(
                *parts, 0.0, mask is None, attn_mask=mask, scale=scale
            )
            y[first:stop], log_sums[:, first:stop] = found[0][0].transpose(0, 1), found[1][0]
        state = q.new_empty(2, dtype=torch.int64)  # of a random generator
        ctx.save_for_backward(q, k, v, bounds, y, log_sums, state)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, _, y, log_sums, _ = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (q, k, v)]
        for first, stop in ctx.documents:
            own, mask = _document((dy, q, k, v, y), first, stop), _window(q, stop - first, ctx.before)
            found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *own, log_sums[None, :, first:stop], 0.0, mask is None, attn_mask=mask, scale=ctx.scale
            )
            for into, grad in zip(grads, found, strict=True):
                into[first:stop] = grad[0].transpose(0, 1)
        return *grads, None, None, None, None


def _document(whole: tuple[torch.Tensor, ...], first: int, stop: int) -> list[torch.Tensor]:
    return [x[first:stop].transpose(0, 1)[None] for x in whole]


def _window(like: torch.Tensor, length: int, before: int) -> torch.Tensor | None:
    """Return a mask of a query's own and `before` earlier keys; None if that is all of them."""
    if not 0 <= before < length:
        return None
    seen = like.new_ones(length, length, dtype=torch.bool).tril_().triu_(-before)
    return like.new_zeros(length, length).masked_fill_(~seen, -torch.inf)


def flash_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *limits: Any, **options: Any) -> tuple[Any, ...]:
    """FlashAttention of samples: q [b, s, n, d], k and v [b, L, g, d] -> output, log-sum-exp, three unused tensors."""
    causal, kwargs = _aligned(q, k, limits[5], options)
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    y, log_sums = aten._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, causal, **kwargs)
    return y.transpose(1, 2), log_sums, *(q.new_empty(0) for _ in range(3))


def flash_backward(dy: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *others: Any, **options: Any) -> tuple[Any, ...]:
    v, y, log_sums, *limits = others
    assert log_sums.is_contiguous(), "the kernel reads no strides of the log-sum-exp"
    causal, kwargs = _aligned(q, k, limits[5], options)
    heads = [x.transpose(1, 2) for x in (dy, q, k, v, y)]
    found = aten._scaled_dot_product_flash_attention_for_cpu_backward(*heads, log_sums, 0.0, causal, **kwargs)
    return tuple(x.transpose(1, 2) for x in found)


def _aligned(q: torch.Tensor, k: torch.Tensor, causal: bool, options: dict[str, Any]) -> tuple[bool, dict[str, Any]]:
    """Return arguments of the CPU's kernel. The last query sees the last key."""
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention needs 16-bit tensors")
    queries, keys, left = q.shape[1], k.shape[1], options.get("window_size_left")
    scale = options.get("scale")
    if (causal and queries == keys) or (not causal and left is None):
        return causal, {"scale": scale}
    assert causal or options["window_size_right"] == 0, "not causal"
    seen = q.new_ones(queries, keys, dtype=torch.bool).tril_(keys - queries)
    if left is not None:
        seen.triu_(keys - queries - left)
    return False, {"attn_mask": q.new_zeros(queries, keys).masked_fill_(~seen, -torch.inf), "scale": scale}
