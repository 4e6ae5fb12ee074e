"""`gradient`: the backward of a layer's graph, without torch's checks in Python."""

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from megazero.engine.kernels.gradient import gradient
from tests.helpers.table import for_each


@for_each("private", [True, False])
@for_each("edge", [True, False])
def test_gradients_are_those_of_torch(private: bool, edge: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without torch's private function, from a tensor or from its place in the graph."""
    if not private:
        monkeypatch.delattr(torch.autograd, "_engine_run_backward")
        monkeypatch.setattr(torch.autograd, "grad", lambda y, x, dy: (3.0 * x.detach() ** 2 * dy,))
        monkeypatch.setattr(torch.autograd, "backward", lambda y, dy: weight.grad.add_(dy))
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    weight.grad = torch.zeros(3, dtype=torch.float64)
    x, dy = (torch.randn(3, dtype=torch.float64) for _ in range(2))
    x.requires_grad_(True)
    ends = [x**3, weight * 1.0]
    cubed, same = map(get_gradient_edge, ends) if edge else ends
    assert torch.allclose(gradient(cubed, x, dy), 3.0 * x.detach() ** 2 * dy, rtol=1e-14, atol=0)
    assert x.grad is None
    assert gradient(same, None, dy) is None
    assert torch.equal(weight.grad, dy)


def test_a_gradient_of_another_shape_is_an_error() -> None:
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="shape"):
        gradient(x * 2.0, x, torch.ones(4))
