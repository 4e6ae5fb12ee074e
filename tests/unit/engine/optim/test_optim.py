"""AdamW on flat slices against torch.optim.AdamW; the learning rate; the clip factor."""

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch

from megazero.engine.optim.adamw import OPERATOR, update
from megazero.engine.optim.step import StepParams
from megazero.engine.plan.layout.flat_layout import FlatParam, equal_ranges, flat_layout
from megazero.engine.step.optimization import LossScale, clip_factor, learning_rate
from megazero.flags.config import OptimizerConfig, TrainingConfig
from tests.helpers.rounding import error_bound
from tests.helpers.table import for_each

CONFIG = OptimizerConfig(lr=2.0, min_lr=0.5, lr_warmup_iters=10, lr_decay_iters=110)


def lr(style: str, iteration: int, **changes: float) -> float:
    return learning_rate(replace(CONFIG, lr_decay_style=style, **changes), iteration)


@for_each("style", ["constant", "linear", "cosine"])
def test_warm_up_is_linear_from_the_first_iteration(style: str) -> None:
    assert [lr(style, i) for i in (1, 5, 10)] == [0.2, 1.0, 2.0]
    assert lr(style, 1, lr_warmup_iters=1) == 2.0


def test_constant_stays() -> None:
    assert {lr("constant", i) for i in (10, 11, 110, 111, 10**6)} == {2.0}
    assert lr("constant", 1, lr_warmup_iters=0) == 2.0


def test_linear() -> None:
    assert [lr("linear", i) for i in (10, 35, 60, 110, 111, 10**6)] == [2.0, 1.625, 1.25, 0.5, 0.5, 0.5]
    assert lr("linear", 1, lr_warmup_iters=0) == pytest.approx(0.5 + 1.5 * 109 / 110)


def test_cosine() -> None:
    found = [lr("cosine", i) for i in (10, 35, 60, 85, 110, 10**6)]
    quarter = 0.75 * math.cos(math.pi / 4)
    assert found == pytest.approx([2.0, 1.25 + quarter, 1.25, 1.25 - quarter, 0.5, 0.5])
    assert found[-2:] == [0.5, 0.5]


@for_each("style", ["linear", "cosine"])
def test_decay_never_rises_and_has_no_step(style: str) -> None:
    values = [lr(style, i) for i in range(10, 130)]
    falls = [a - b for a, b in itertools.pairwise(values)]
    assert all(0 <= fall < 0.04 for fall in falls)


@for_each("style", ["exponential", "linear", "cosine", "minus_sqrt"])
def test_wsd_is_stable_and_then_decays(style: str) -> None:
    """Warm-up to 10, stable to 80, and Megatron-LM's four shapes in the last 20."""
    changes = {"lr_wsd_decay_iters": 20, "lr_wsd_decay_style": style, "lr_warmup_iters": 10, "lr_decay_iters": 100}
    rates = [lr("wsd", i, **changes) for i in range(1, 131)]
    assert rates[4] == CONFIG.lr / 2 and rates[9:80] == [CONFIG.lr] * 71
    assert rates[99:] == pytest.approx([CONFIG.min_lr] * 31, rel=1e-12)
    half = {"exponential": math.sqrt(2) - 1, "linear": 0.5, "cosine": 0.5, "minus_sqrt": 1 - math.sqrt(0.5)}[style]
    assert rates[89] == pytest.approx(CONFIG.min_lr + half * (CONFIG.lr - CONFIG.min_lr), rel=1e-12)
    assert all(left > right for left, right in itertools.pairwise(rates[79:100]))


def test_inverse_square_root() -> None:
    changes = {"lr_warmup_iters": 4, "lr_decay_iters": 100, "min_lr": CONFIG.lr / 4}
    assert [lr("inverse-square-root", i, **changes) / CONFIG.lr for i in (2, 4, 16, 64, 100, 101)] == pytest.approx(
        [0.5, 1, 0.5, 0.25, 0.25, 0.25], rel=1e-12
    )
    assert lr("inverse-square-root", 9, lr_warmup_iters=0, min_lr=0.0) == pytest.approx(CONFIG.lr / 3, rel=1e-12)


def test_clip_factor() -> None:
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(0.0, 1.0) == 1.0
    assert clip_factor(1e9, 0.0) == 1.0
    for norm in (1.0, 4.0, 1e9):
        gradient = torch.full((16,), norm / 4, dtype=torch.float64).requires_grad_()
        gradient.grad = gradient.detach().clone()
        torch.nn.utils.clip_grad_norm_([gradient], 1.0)
        assert clip_factor(norm, 1.0) == pytest.approx(float(gradient.grad[0] / gradient.detach()[0]), rel=1e-12)
    for norm in (math.nan, math.inf):
        with pytest.raises(AssertionError):  # a skip is decided before
            clip_factor(norm, 1.0)


# Decayed and not, cut and not, with gaps between.
PARAMS = [
    FlatParam("matrix", 200, True, frozenset({"tp"})),
    FlatParam("positions", 70, True),
    FlatParam("norm", 33, False),
    FlatParam("bias", 5, False, frozenset({"tp"})),
]
STEPS = 6
OPTIMIZER = OptimizerConfig(weight_decay=0.3, adam_beta1=0.8, adam_beta2=0.95, adam_eps=1e-6)


@for_each(("ranks", "dtype"), [*((n, torch.float32) for n in (1, 2, 3, 8)), (2, torch.float64)])
def test_slices_learn_as_torchs_adamw_does(ranks: int, dtype: torch.dtype) -> None:
    """Each rank updates its own range of a flat buffer; torch has one tensor a parameter."""
    flat = flat_layout(PARAMS, ranks)
    generator = torch.Generator().manual_seed(0)
    theirs = {p.name: torch.randn(p.numel, generator=generator, dtype=dtype).requires_grad_() for p in PARAMS}
    master = torch.zeros(flat.numel, dtype=dtype)
    for name, window in flat.windows.items():
        master[window.slice()] = theirs[name].detach()
    moments = torch.zeros_like(master), torch.zeros_like(master)
    groups = [
        {"params": [theirs[p.name] for p in PARAMS if p.decays], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [theirs[p.name] for p in PARAMS if not p.decays], "weight_decay": 0.0},
    ]
    betas = OPTIMIZER.adam_beta1, OPTIMIZER.adam_beta2
    optimizer = torch.optim.AdamW(groups, betas=betas, eps=OPTIMIZER.adam_eps)
    largest = [master.abs().max(), torch.zeros(())]  # of the first weights, of all gradients
    for step in range(1, STEPS + 1):
        rate = 0.1 / step
        gradient = torch.zeros_like(master)
        for name, window in flat.windows.items():
            theirs[name].grad = torch.randn(window.numel, generator=generator, dtype=dtype)
            gradient[window.slice()] = theirs[name].grad
        largest[1] = torch.maximum(largest[1], gradient.abs().max())
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        for rank in range(ranks):
            owned = equal_ranges(flat.numel, ranks)[rank]
            own = owned.slice()
            decayed = flat.decayed.within(owned).numel
            update(
                StepParams(OPTIMIZER, rate, torch.tensor(float(step))),
                master[own],
                gradient[own],
                (moments[0][own], moments[1][own]),
                decayed,
            )
    # A step rounds a moment three times, a weight ten times. Moments are means of gradients and of their squares; a
    # weight is the first one and steps, whose sizes are at most the rates times 1 / (1 - beta1) each.
    steps = sum(0.1 / step for step in range(1, STEPS + 1)) / (1 - OPTIMIZER.adam_beta1)
    for name, window in flat.windows.items():
        state = optimizer.state[theirs[name]]
        for found, wanted, magnitude, roundings in (
            (master, theirs[name].detach(), float(largest[0]) + steps, 10),
            (moments[0], state["exp_avg"], float(largest[1]), 3),
            (moments[1], state["exp_avg_sq"], float(largest[1]) ** 2, 3),
        ):
            bound = error_bound(magnitude, roundings * STEPS, dtype)
            assert float((found[window.slice()] - wanted).abs().max()) < bound
    for gap in flat.gaps:
        assert not master[gap.slice()].any() and not moments[1][gap.slice()].any()


@for_each("decayed", [0, 64, 128])
def test_decay_ends_where_it_is_said(decayed: int) -> None:
    """Decay is all that happens without a gradient; the gradient is read only."""
    master, gradient = torch.ones(128), torch.zeros(128)
    update(
        StepParams(OPTIMIZER, 0.5, torch.ones(())),
        master,
        gradient,
        (torch.zeros(128), torch.zeros(128)),
        decayed,
    )
    assert torch.equal(master[:decayed], torch.full((decayed,), 1 - 0.5 * 0.3))
    assert torch.equal(master[decayed:], torch.ones(128 - decayed))
    assert not gradient.any()


def test_the_bias_correction_follows_the_step() -> None:
    """The first step is lr x the gradient's sign, for any size; fresh moments later on are corrected less."""
    beta1, beta2 = OPTIMIZER.adam_beta1, OPTIMIZER.adam_beta2
    gradient = torch.tensor([3.0, -0.2] * 32)
    for step in (1, 2, 50):
        master = torch.zeros(64)
        params = StepParams(replace(OPTIMIZER, adam_eps=1e-12), 0.1, torch.tensor(float(step)))
        update(params, master, gradient, (torch.zeros(64), torch.zeros(64)), 0)
        size = 0.1 * (1 - beta1) / (1 - beta1**step) / math.sqrt((1 - beta2) / (1 - beta2**step))
        assert step > 1 or size == pytest.approx(0.1)
        torch.testing.assert_close(master, -size * gradient.sign())


@for_each("dtype", [torch.float32, torch.float64])
@for_each("divisor", [None, 1.7, 2.0**16])
def test_torchs_private_operator_is_its_public_function(dtype: torch.dtype, divisor: float | None) -> None:
    """They are equal to the bit; both divide the gradient, in its own precision."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(192, generator=generator, dtype=dtype).abs() for _ in range(4)]
    by = None if divisor is None else torch.tensor(divisor, dtype=dtype)
    found = []
    for given, operator in ((by, OPERATOR), (by, None), (None, OPERATOR)):
        master, gradient, *moments = (x.clone() for x in start)
        if given is None and divisor is not None:
            gradient /= divisor
        update(StepParams(OPTIMIZER, 0.1, torch.tensor(3.0), given), master, gradient, tuple(moments), 64, operator)
        found.append([master, gradient, *moments])
    assert OPERATOR is not None
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@for_each("numel", [0, 64])
def test_an_empty_range_is_no_trouble(numel: int) -> None:
    """A rank may own nothing of a unit, or nothing that decays, or nothing else: each slice is stepped or left out."""
    for decayed in (0, numel):
        master, moments = torch.ones(numel), (torch.zeros(numel), torch.zeros(numel))
        update(StepParams(OPTIMIZER, 0.1, torch.ones(())), master, torch.ones(numel), moments, decayed)
        kept = 1 - 0.1 * OPTIMIZER.weight_decay if decayed else 1.0
        torch.testing.assert_close(master, torch.full((numel,), kept - 0.1))


def scale(**changes) -> LossScale:
    start = LossScale.of(TrainingConfig(precision="fp16", loss_scale_window=3))
    assert start is not None
    return replace(start, **changes)


def test_only_fp16_scales_the_loss() -> None:
    assert LossScale.of(TrainingConfig()) is None
    assert LossScale.of(TrainingConfig(precision="bf16")) is None
    assert scale().value == 2**16


def test_hysteresis_forgives_one_overflow() -> None:
    once = scale().after(True)
    assert once.value == 2**16 and once.after(True).value == 2**15
    assert once.after(True).after(True).value == 2**14  # none is left until a window has passed


def test_a_window_without_overflow_doubles_the_scale() -> None:
    s = scale().after(True)
    for _ in range(2):
        s = s.after(False)
        assert s.value == 2**16
    assert s.after(False).value == 2**17 and s.after(False).left == 2
    assert s.after(True).after(False).after(False).value == 2**15  # the count restarts after an overflow


def test_the_scale_stays_above_its_least() -> None:
    s = scale(value=1.0, left=1)
    assert s.exhausted and s.after(True).value == 1.0
    assert not scale(value=1.0).exhausted  # one overflow is forgiven first
    assert not scale(value=2.0, left=0).exhausted


@for_each("window", [1, 2, 5])
def test_without_hysteresis_the_scale_is_torchs(window: int) -> None:
    """torch.amp.GradScaler, over two hundred iterations of which some overflow."""
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=window)
    ours = LossScale.of(TrainingConfig(precision="fp16", loss_scale_window=window, hysteresis=1, min_loss_scale=1e-30))
    parameter = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    draw = random.Random(window)
    for _ in range(200):
        assert ours.value == theirs.get_scale()
        overflow = draw.random() < 0.3
        parameter.grad = torch.full((1,), math.inf if overflow else 1.0)
        theirs.scale(torch.zeros(()))
        theirs.step(optimizer)
        theirs.update()
        ours = ours.after(overflow)
