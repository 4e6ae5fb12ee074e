"""Muon and Lion in one process: against torch.optim.Muon, and against the formulas of their papers."""

from dataclasses import replace

import pytest
import torch
from torch.optim import _muon

from megazero.engine.optim import lion, muon
from megazero.engine.optim.muon import OwnedMatrices, newton_schulz
from megazero.engine.optim.step import StepParams
from megazero.engine.plan.layout.flat_layout import Matrices, Range
from megazero.flags.config import OptimizerConfig
from megazero.planner.time.costs import iteration_products
from tests.helpers.table import for_each

CONFIG = OptimizerConfig(
    lr=0.03, weight_decay=0.2, adam_beta1=0.85, adam_beta2=0.97, muon_momentum=0.9, muon_num_ns_steps=6
)
STEPS = 20
# shape of a weight, the dims that number its matrices
WEIGHTS = [((24, 40), ()), ((40, 24), ()), ((4, 3, 8, 16), (1,)), ((2, 48, 32), (0,)), ((3, 2, 16, 8), (0, 1))]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@for_each("shape", [(16, 16), (24, 64), (7, 300)])
def test_iterations_in_bf16_are_as_exact_as_torchs(shape: tuple[int, int]) -> None:
    """torch's are in bf16 alone. Both round every product; torch also rounds the norm."""
    x, coefficients = random(*shape).bfloat16(), (3.4445, -4.7750, 2.0315)
    wanted = in_fp64(x.double(), coefficients, 5, 1e-7)
    ours, theirs = newton_schulz(x, 5, None), _muon._zeropower_via_newtonschulz(x.clone(), coefficients, 5, 1e-7)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert (ours - wanted).norm() < 2 * (theirs - wanted).norm() < 0.1 * wanted.norm()


def test_singular_values_go_near_one() -> None:
    """The polynomial's values are between 0.68 and 1.13 after five iterations, of values that are not near 0."""
    u, _, v = torch.linalg.svd(random(20, 50), full_matrices=False)
    x = u @ torch.diag(torch.linspace(0.2, 3.0, 20, dtype=torch.float64)) @ v
    values = torch.linalg.svdvals(newton_schulz(x, 5, None))
    assert 0.65 < values.min() and values.max() < 1.2
    assert torch.allclose(newton_schulz(x, 5, None) @ x.T, x @ newton_schulz(x, 5, None).T)  # the same vectors
    assert not newton_schulz(torch.zeros(4, 6), 5, None).any()


def in_fp64(x: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> torch.Tensor:
    """torch's iterations, without its rounding to bf16."""
    a, b, c = coefficients
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        x = a * x + b * x @ x.T @ x + c * x @ x.T @ x @ x.T @ x
    return x


@for_each(("scale", "theirs"), [("moonlight", "match_rms_adamw"), ("keller", "original")])
def test_weights_are_those_of_torchs_muon(scale: str, theirs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of five weights, which torch gets matrix by matrix; after 20 updates with clipping. Four decay."""
    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", in_fp64)
    config = replace(CONFIG, muon_scale=scale)  # type: ignore[arg-type]
    owned, at = [], 0
    for shape, numbers in WEIGHTS:
        sizes = [size for dim, size in enumerate(shape) if dim not in numbers]
        count = torch.Size(shape).numel() // torch.Size(sizes).numel()
        matrices = Matrices(count, torch.Size(sizes[:-1]).numel(), sizes[-1])
        owned.append(OwnedMatrices(matrices, Range(at, at + torch.Size(shape).numel()), shape, numbers, None))
        at = owned[-1].owned.stop
    master, momentum = random(at), torch.zeros(at, dtype=torch.float64)
    parameters = [view.flatten(0, -2).clone().requires_grad_() for each in owned for view in each.views(master)]
    assert len(parameters) == 1 + 1 + 3 + 2 + 6
    decayed = owned[-1].owned.start
    reference = torch.optim.Muon(
        [{"params": parameters[:-6]}, {"params": parameters[-6:], "weight_decay": 0.0}],
        config.lr,
        config.weight_decay,
        config.muon_momentum,
        ns_steps=6,
        adjust_lr_fn=theirs,
    )
    for step in range(STEPS):
        gradient, divisor = random(at, seed=step + 1), torch.tensor(1.0 + step % 3, dtype=torch.float64)
        views = [view.flatten(0, -2) for each in owned for view in each.views(gradient)]
        for parameter, view in zip(parameters, views, strict=True):
            parameter.grad = view / divisor
        reference.step()
        params = StepParams(config, config.lr, torch.tensor(step + 1.0), divisor)
        muon.update(params, master, gradient.clone(), (momentum,), decayed, owned, torch.float64)
    found = [view.flatten(0, -2) for each in owned for view in each.views(master)]
    for ours, parameter in zip(found, parameters, strict=True):
        assert (ours - parameter).abs().max() < 1e-10


def test_weights_are_those_of_lion() -> None:
    """Algorithm 2 of its paper; the first 30 elements decay."""
    master, moment = random(50), torch.zeros(50, dtype=torch.float64)
    weight, mean = master.clone(), moment.clone()
    decay = torch.tensor([CONFIG.weight_decay] * 30 + [0.0] * 20, dtype=torch.float64)
    for step in range(STEPS):
        gradient = random(50, seed=step + 1)
        direction = torch.sign(CONFIG.adam_beta1 * mean + (1 - CONFIG.adam_beta1) * gradient)
        weight = weight - CONFIG.lr * (direction + decay * weight)
        mean = CONFIG.adam_beta2 * mean + (1 - CONFIG.adam_beta2) * gradient
        params = StepParams(CONFIG, CONFIG.lr, torch.tensor(step + 1.0), torch.tensor(2.0, dtype=torch.float64))
        lion.update(params, master, 2 * gradient, (moment,), 30)
    assert (master - weight).abs().max() < 1e-12 and (moment - mean).abs().max() < 1e-12


def test_a_matrix_is_gathered_if_its_divided_side_is_the_shorter_one() -> None:
    """Working memory and products by hand: up [64, 16] and its gate on four ranks, and keys [8, 16]."""
    up = Matrices(2, 64, 16, "tp", by_rows=True)
    assert up.sums_grams and up.sides == (16, 64) and up.working(4) == 3 * 16 * 16 + 2 * 16 * 16
    assert iteration_products(up, 4) == ((16, 16, 16), (16, 16, 16), (16, 16, 16))
    assert iteration_products(up, 2) == ((16, 16, 32), (16, 16, 16), (16, 32, 16))
    keys = Matrices(1, 8, 16, "tp", by_rows=True)
    assert not keys.sums_grams and keys.sides == (8, 16) and keys.working(4) == 3 * 8 * 16 + 2 * 8 * 8 + 2 * 16
    assert iteration_products(keys, 4) == ((8, 8, 16), (8, 8, 8), (8, 16, 8))
    down = Matrices(1, 16, 64, "tp", by_rows=False)
    assert down.sums_grams and down.sides == (16, 64)
    alone = Matrices(1, 64, 16)
    assert not alone.sums_grams and alone.sides == (16, 64) and alone.working(1) == 3 * 1024 + 2 * 256
    assert alone.cost == 16 * 16 * 64 and up.cost == 2 * alone.cost
