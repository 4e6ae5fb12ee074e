"""The fused kernels of torch that attend to a part of a query's keys, below autograd.

Shapes: b samples, n heads, g groups of keys and values, d head dim, q queries, L keys.
"""

from typing import Any, Protocol

import torch

from megazero import torch_private
from megazero.engine.model.context_parallel.pieces import Part, window_mask
from megazero.engine.model.scores import Scores

Tensors = tuple[torch.Tensor, ...]


class PieceKernel(Protocol):
    """A kernel. `joined`: it attends to earlier and own keys together; else they are two parts."""

    joined: bool

    def forward(self, part: Part, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
        """q [b, n, q, d], k and v [b, g, L, d] -> output [b, n, q, d], log-sum-exp of the scores [b, n, q]"""
        ...

    def backward(self, part: Part, dy: torch.Tensor, *saved: torch.Tensor) -> Tensors:
        """Return the gradients of q, k and v. `saved`: q, k, v; output and log-sum-exp over all keys of the queries."""
        ...


class CpuKernel:
    """torch's kernel for CPUs. It takes square causal scores, all scores, or a mask."""

    joined = False

    def __init__(self, like: torch.Tensor, scores: Scores) -> None:
        self.mask, self.scale = window_mask(like, scores.window), scores.scale or None

    def _options(self, part: Part) -> tuple[bool, dict[str, Any]]:
        mask = part.piece.of(self.mask) if part.own else None
        return part.own and mask is None, {"attn_mask": mask, "scale": self.scale}

    def forward(self, part: Part, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
        causal, options = self._options(part)
        found: Tensors = torch_private.CPU_ATTENTION(q, k, v, 0.0, causal, **options)
        return found

    def backward(self, part: Part, dy: torch.Tensor, *saved: torch.Tensor) -> Tensors:
        causal, options = self._options(part)
        found: Tensors = torch_private.CPU_ATTENTION_BACKWARD(dy, *saved, 0.0, causal, **options)
        return found


class FlashKernel:
    """FlashAttention on a GPU. It knows windows. The last of fewer causal queries than keys sees all keys."""

    joined = True

    def __init__(self, scores: Scores) -> None:
        self.window, self.scale = scores.window, scores.scale or None

    def _options(self, part: Part, q: torch.Tensor, k: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        limits = None, None, q.shape[1], k.shape[1], 0.0, part.own and not self.window
        windowed = part.own and self.window
        window = {"window_size_left": self.window - 1, "window_size_right": 0} if windowed else {}
        return limits, {"scale": self.scale, **window}

    def forward(self, part: Part, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
        heads = [x.transpose(1, 2) for x in (q, k, v)]
        limits, options = self._options(part, *heads[:2])
        y, log_sums, *_ = torch_private.FLASH_ATTENTION(*heads, *limits, False, **options)
        return y.transpose(1, 2), log_sums

    def backward(self, part: Part, dy: torch.Tensor, *saved: torch.Tensor) -> Tensors:
        *heads, log_sums = saved
        dy, q, k, v, y = (x.transpose(1, 2) for x in (dy, *heads))
        limits, options = self._options(part, q, k)
        # without dropout, the state of the random generator is not used
        state, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), q.new_empty(0)
        found = torch_private.FLASH_ATTENTION_BACKWARD(
            dy, q, k, v, y, log_sums.contiguous(), *limits, state, unused, **options
        )
        return tuple(x.transpose(1, 2) for x in found)


def merge_(y: torch.Tensor, log_sums: torch.Tensor, more: torch.Tensor, more_sums: torch.Tensor) -> None:
    """Merge the attention to more keys into y [.., d] and log_sums [..]: means weighted by the sums of exponentials.

    The weight is a sigmoid, so no exponential overflows.
    """
    y.lerp_(more.to(y.dtype), torch.sigmoid(more_sums - log_sums)[..., None].to(y.dtype))
    log_sums.copy_(torch.logaddexp(log_sums, more_sums))
