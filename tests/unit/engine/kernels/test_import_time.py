"""The start of a process: modules that it does not import, and the backward that needs none of them."""

import subprocess
import sys

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from megazero.engine.kernels.gradient import gradient
from tests.helpers.programs import ROOT
from tests.helpers.table import for_each

HEAVY = "datasets jinja2 matplotlib pandas rich scipy sentencepiece sympy tokenizers transformers triton wandb".split()
FLAGS = (
    "--architecture gpt-oss --num-experts 4 --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 "
    "--vocab-size 50 --mock-data --train-iters 2 --micro-batch-size 1 --global-batch-size 2"
)


@pytest.mark.second
@pytest.mark.long
def test_a_start_imports_no_heavy_modules() -> None:
    """A step of training needs none of them; `torch` itself imports parts of some others."""
    program = f"""
import gc, sys
from megazero.console.commands import run_command
run_command(["train", *"{FLAGS}".split()])
print(sorted(set({HEAVY}) & set(sys.modules)), "torch._dynamo" in sys.modules, gc.isenabled(), gc.get_freeze_count())
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[] False True 0", done.stdout + done.stderr
    assert "iteration 2/2" in done.stdout


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
