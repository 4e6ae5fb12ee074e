"""Attention kernels of a GPU, computed by the CPU's. They save the same bytes for backward as a GPU's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from tests.helpers.pretended_gpu.modes import Session

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
        with session.pausing():
            bounds = q_bounds.tolist()
        found = []
        for first, stop in itertools.pairwise(bounds):
            part = (x[first:stop].transpose(0, 1)[None] for x in (q, k, v))
            mask = None
            if 0 <= before < stop - first:
                seen = q.new_ones(stop - first, stop - first, dtype=torch.bool).tril_().triu_(-before)
                mask = q.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)
            options = {"is_causal": mask is None, "enable_gqa": enable_gqa, "scale": scale}
            y = F.scaled_dot_product_attention(*part, attn_mask=mask, **options)
            found.append(y[0].transpose(0, 1))
        return torch.cat(found)

    return attend
