"""`gradient`: runs a layer's autograd graph backward, without torch's check of shapes in Python.

That check imports sympy: half a thousand files and a third of a second of a start. The engine in C++ checks too. GPU
runs import sympy nevertheless, because torch checks operators on tensors without data in Python (`planner.trace`).
"""

import torch
from torch.autograd.graph import GradientEdge


def gradient(y: torch.Tensor | GradientEdge, x: torch.Tensor | None, dy: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of x, given that of y.

    Args:
        x: None: return None, because only the Functions matter that write gradients of weights.
    """
    run = getattr(torch.autograd, "_engine_run_backward", None)  # private to torch; both public functions call it
    if run is not None:
        inputs = () if x is None else (x,)
        found = run((y,), (dy,), False, False, inputs, x is None, accumulate_grad=x is None)
        return found[0] if found else None
    if x is not None:
        return torch.autograd.grad(y, x, dy)[0]
    torch.autograd.backward(y, dy)
    return None
