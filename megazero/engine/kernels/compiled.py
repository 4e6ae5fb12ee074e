"""Operations that gain from torch.compile (--compile), written for it.

Compiled norms and dropout are no faster than torch's own. Code with a collective, with a product that writes into a
flat gradient buffer, or with a counter in Python is never compiled.
"""

from collections.abc import Callable
from typing import Any

import torch

from megazero.engine.kernels.eager import GELU_A, GELU_B, scores_grad, unseen, wide
from megazero.engine.kernels.kernel_table import EAGER, Activation, Kernels


def _gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU by tanh: 1 + tanh(z) = 2 sigmoid(2 z). On a CPU a vector of exp costs a third of one of tanh."""
    return x * torch.sigmoid(x * (GELU_A + GELU_B * x * x))


def _gelu_grad(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    s = torch.sigmoid(x * (GELU_A + GELU_B * x * x))
    return dy * (s + x * s * (1 - s) * (GELU_A + 3 * GELU_B * x * x))


def _swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, value = x.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * value


def _swiglu_grad(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    gate, value = x.chunk(2, dim=-1)
    s = torch.sigmoid(gate)
    return torch.cat([dy * value * s * (1 + gate * (1 - s)), dy * gate * s], dim=-1)


def _causal_softmax(
    scores: torch.Tensor, starts: torch.Tensor | None = None, indices: torch.Tensor | None = None
) -> torch.Tensor:
    seen = scores.to(wide(scores)).masked_fill(unseen(scores, starts, indices), -torch.inf)
    return seen.softmax(-1).to(scores.dtype)


ACTIVATIONS = {"gelu-tanh": (_gelu, _gelu_grad), "swiglu": (_swiglu, _swiglu_grad)}  # unless `kernels` have their own


def compiled(kernels: Kernels, device: torch.device) -> Kernels:
    """Replace torch's operators in `kernels` by functions that torch compiles when it first sees their shapes.

    Raises:
        ValueError: torch cannot compile here.
    """

    def compile_(fn: Callable[..., torch.Tensor]) -> Any:
        return torch.compile(fn, dynamic=False)

    def pair(forward: Callable[..., torch.Tensor], grad: Callable[..., torch.Tensor]) -> Activation:
        made = compile_(grad)
        return Activation(compile_(forward), lambda dy, x: (made(dy, x), None))

    activations = {**EAGER.activations} | {name: pair(*functions) for name, functions in ACTIVATIONS.items()}
    try:
        activations["gelu-tanh"].forward(torch.zeros(64, device=device))
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise ValueError(
            f"--compile: torch cannot compile here ({reason[0] if reason else type(error).__name__}); "
            f"{'install a C++ compiler, such as g++' if device.type == 'cpu' else 'install triton'}, or drop --compile"
        ) from error
    kernels = kernels._replace(causal_softmax=compile_(_causal_softmax), scores_grad=compile_(scores_grad))
    return kernels._replace(activations=activations) if kernels.activations is EAGER.activations else kernels
