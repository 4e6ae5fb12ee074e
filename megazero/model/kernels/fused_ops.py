"""Operations of a block, between products and collectives, that gain from being compiled. No state, no collectives.

Only these: compiled norms and dropout are no faster than torch's own, and what contains a collective, a product that
writes into a flat gradient buffer, or a counter in Python is never traced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

GELU_A = 2 * (2 / torch.pi) ** 0.5
GELU_B = 0.044715 * GELU_A


def wide(x: torch.Tensor) -> torch.dtype:
    """Return the type in which sums over x are made: fp32, or fp64 of fp64."""
    return torch.promote_types(x.dtype, torch.float32)


def is_stand_in(x: torch.Tensor) -> bool:
    """True of a tensor without data, which a layer is traced with: it is worked on whole, not in chunks."""
    return x.is_meta or type(x) not in (torch.Tensor, torch.nn.Parameter)


class Activation(NamedTuple):
    """A function of x alone, and its gradient, below autograd."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    # (dy, x) -> dx, and its sum over tokens in fp32 if that costs no pass of its own; dy and x may be overwritten
    grad: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]


class FusedOps(NamedTuple):
    """Shapes: all elementwise but for the last dim of the attention weights [.., s, s]."""

    gelu: Activation  # by tanh
    swiglu: Activation  # [.., 2 f], gates and values -> silu(gates) * values
    # (scores [b, n, s, s], None or [b, s]: the first key that each query sees) -> weights; scores may be changed
    causal_softmax: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
    # (weights, weights behind dropout, gradient of those, scale) -> gradient of the scores
    scores_grad: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _gelu_grad(dy: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, None]:
    return torch.ops.aten.gelu_backward.grad_input(dy, x, approximate="tanh", grad_input=dy), None


def _swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(value)


def _swiglu_grad(dy: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, None]:
    gate, value = x.chunk(2, dim=-1)
    dsilu = dy * value
    torch.mul(dy, F.silu(gate), out=value)
    torch.ops.aten.silu_backward.grad_input(dsilu, gate, grad_input=gate)
    return x, None


def _unseen(scores: torch.Tensor, starts: torch.Tensor | None) -> torch.Tensor:
    """True where a query does not see a key: [s, s], or [b, 1, s, s]."""
    at = torch.arange(scores.shape[-1], device=scores.device)
    future = at > at[:, None]
    return future if starts is None else future | (at < starts[:, None, :, None])


def _causal_softmax(scores: torch.Tensor, starts: torch.Tensor | None = None) -> torch.Tensor:
    return scores.masked_fill_(_unseen(scores, starts), -torch.inf).softmax(-1, dtype=wide(scores)).to(scores.dtype)


def _scores_grad(weights: torch.Tensor, dropped: torch.Tensor, ddropped: torch.Tensor, scale: float) -> torch.Tensor:
    """Softmax behind dropout: dropped * ddropped is weights * dweights, so that the mask is made once."""
    product = dropped * ddropped
    mean = product.sum(-1, keepdim=True, dtype=wide(product)).to(product.dtype)
    return product.sub_(weights * mean).mul_(scale)


PLAIN = FusedOps(
    gelu=Activation(_gelu, _gelu_grad),
    swiglu=Activation(_swiglu, _swiglu_grad),
    causal_softmax=_causal_softmax,
    scores_grad=_scores_grad,
)


def _sigmoid_gelu(x: torch.Tensor) -> torch.Tensor:
    """The same function: 1 + tanh(z) = 2 sigmoid(2 z). On a CPU a vector of exp costs a third of one of tanh."""
    return x * torch.sigmoid(x * (GELU_A + GELU_B * x * x))


def _sigmoid_gelu_grad(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    s = torch.sigmoid(x * (GELU_A + GELU_B * x * x))
    return dy * (s + x * s * (1 - s) * (GELU_A + 3 * GELU_B * x * x))


def _sigmoid_swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, value = x.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * value


def _sigmoid_swiglu_grad(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    gate, value = x.chunk(2, dim=-1)
    s = torch.sigmoid(gate)
    return torch.cat([dy * value * s * (1 + gate * (1 - s)), dy * gate * s], dim=-1)


def _softmax_in_one(scores: torch.Tensor, starts: torch.Tensor | None = None) -> torch.Tensor:
    return scores.to(wide(scores)).masked_fill(_unseen(scores, starts), -torch.inf).softmax(-1).to(scores.dtype)


def compiled(device: torch.device) -> FusedOps:
    """Compiled by torch, each when its shapes are first seen.

    Raises:
        ValueError: torch cannot compile here.
    """

    def compile_(fn: Callable[..., torch.Tensor]) -> Any:
        return torch.compile(fn, dynamic=False)

    def pair(forward: Callable[..., torch.Tensor], grad: Callable[..., torch.Tensor]) -> Activation:
        made = compile_(grad)
        return Activation(compile_(forward), lambda dy, x: (made(dy, x), None))

    ops = FusedOps(
        gelu=pair(_sigmoid_gelu, _sigmoid_gelu_grad),
        swiglu=pair(_sigmoid_swiglu, _sigmoid_swiglu_grad),
        causal_softmax=compile_(_softmax_in_one),
        scores_grad=compile_(_scores_grad),
    )
    try:
        ops.gelu.forward(torch.zeros(64, device=device))
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise ValueError(
            f"--compile: torch cannot compile here ({reason[0] if reason else type(error).__name__}); "
            f"{'install a C++ compiler, such as g++' if device.type == 'cpu' else 'install triton'}, or drop --compile"
        ) from error
    return ops
