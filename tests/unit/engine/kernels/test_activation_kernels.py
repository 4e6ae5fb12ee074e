"""Each activation has a forward and a backward in every table of kernels, and a plain function to compare with."""

import typing
from dataclasses import replace

import pytest
import torch

from megazero.engine.kernels.kernel_table import EAGER, GATED, KERNELS
from megazero.engine.options.model_options import ActivationName
from megazero.flags.cli import parse
from tests.helpers.table import for_each
from tests.reference import ACTIVATIONS

NAMES = typing.get_args(ActivationName)
ROWS, COLUMNS = 50, 12


def numbers(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [50, 12], on both sides of every kink and of a clamp at 7; a gradient of as many columns."""
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(ROWS, COLUMNS, generator=generator, dtype=torch.float64) for _ in range(2))
    x *= 7
    gate, value = x.chunk(2, -1)
    assert all(bool((part > 7).any() and (part < -7).any()) for part in (gate, value))
    return x.to(dtype), dy.to(dtype)


def test_every_table_has_every_activation() -> None:
    assert all(set(kernels.activations) == set(NAMES) for kernels in KERNELS.values())
    assert set(ACTIVATIONS) == set(NAMES) and set(GATED) < set(NAMES)


@for_each("name", NAMES)
def test_an_activation_and_its_gradient(name: str) -> None:
    """Against autograd of the plain function, to the rounding of fp64."""
    x, dy = numbers(torch.float64)
    dy = dy[:, : COLUMNS // 2].contiguous() if name in GATED else dy
    wanted = ACTIVATIONS[name](x.requires_grad_())
    (dx,) = torch.autograd.grad(wanted, x, dy)
    ours = EAGER.activations[name]
    torch.testing.assert_close(ours.forward(x.detach()), wanted.detach())
    torch.testing.assert_close(ours.grad(dy.clone(), x.detach().clone())[0], dx)


@for_each("architecture", ["gpt2", "llama", "gemma2"])
def test_a_flag_replaces_that_of_the_architecture(architecture: str) -> None:
    model = "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --vocab-size 9".split()
    plain = parse([*model, "--architecture", architecture]).model
    changed = parse([*model, "--architecture", architecture, "--activation", "squared-relu"]).model
    assert changed == replace(plain, activation="squared-relu") != plain


def test_an_unknown_activation_is_refused_with_all_names() -> None:
    with pytest.raises(ValueError, match=r"--activation.*squared-relu"):
        parse("--num-layers 1 --hidden-size 8 --num-attention-heads 2 --activation tanh".split())
