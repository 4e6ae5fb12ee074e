"""Scores, choices and weights of a router against the published algorithm, token by token."""

import math
from typing import Any

import pytest
import torch

from megazero.engine.memory.tracker import MemoryTracker
from megazero.engine.model.dispatch import Balance
from megazero.engine.model.experts.router import ExpertScores, Router
from megazero.engine.model.layers.context import Context, MicroBatchInfo, ResidualStream
from megazero.engine.model.layers.weight import GradWriter, Weight
from megazero.engine.plan.layout.topology import Layout
from megazero.flags.config import ModelConfig
from megazero.planner.trace.pretend import pretend_mesh

E, K, T, H = 12, 3, 40, 8
TOLERANCE = 1e-10
OPTIONS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax-biased": {"moe_router_enable_expert_bias": True, "moe_router_topk_scaling_factor": 1.5},
    "softmax-pre-groups": {
        "moe_router_pre_softmax": True,
        "moe_router_num_groups": 6,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 16.0,
    },
    "sigmoid": {"moe_router_score_function": "sigmoid"},
    "sigmoid-pre": {
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": 0.7,
    },
    "deepseek-v3": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
    },
    "groups-of-one": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 12,
        "moe_router_group_topk": 4,
    },
}
EVERY = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def model_of(options: dict[str, Any]) -> ModelConfig:
    return ModelConfig(hidden_size=H, num_experts=E, moe_router_topk=K, **options)


def numbers(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def scores_of(model: ModelConfig, logits: list[float]) -> list[float]:
    """Return the scores of the experts of one token."""
    if model.moe_router_score_function == "sigmoid":
        return [1 / (1 + math.exp(-x)) for x in logits]
    total = sum(map(math.exp, logits))
    return [math.exp(x) / total for x in logits]


def chosen(model: ModelConfig, logits: list[float], bias: list[float]) -> set[int]:
    """Return the experts of one token."""
    wanted = [score + b for score, b in zip(scores_of(model, logits), bias, strict=True)]
    allowed = set(range(E))
    if model.moe_router_num_groups:
        each = E // model.moe_router_num_groups
        groups = [range(first, first + each) for first in range(0, E, each)]
        best = {group: sum(sorted(wanted[i] for i in group)[-2:]) for group in groups}
        allowed = {i for group in sorted(groups, key=best.__getitem__)[-model.moe_router_group_topk :] for i in group}
    return set(sorted(allowed, key=wanted.__getitem__)[-K:])


def weights_of(model: ModelConfig, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the weights [T, k], as published and by autograd's operators."""
    scores = logits.sigmoid() if model.moe_router_score_function == "sigmoid" else logits.softmax(-1)
    mine = scores.gather(1, ids)
    if not model.moe_router_pre_softmax:
        mine = mine / (mine.sum(-1, keepdim=True) + 1e-20)
    return mine * model.moe_router_topk_scaling_factor


@EVERY
def test_a_token_passes_the_published_experts(options: dict[str, Any]) -> None:
    model, logits, bias = model_of(options), numbers(T, E) * 2, numbers(E, seed=9) * 0.4 - 1.5
    biased = bias if model.moe_router_enable_expert_bias else None
    ids = ExpertScores(model).choose(logits, biased)
    used = bias.tolist() if biased is not None else [0.0] * E
    assert [set(row) for row in ids.tolist()] == [chosen(model, row, used) for row in logits.tolist()]
    if biased is not None:  # it decides some choices
        assert ids.sort().values.tolist() != ExpertScores(model).choose(logits, bias * 0).sort().values.tolist()


@EVERY
def test_weights_and_their_gradient_are_the_published_ones(options: dict[str, Any]) -> None:
    model, logits = model_of(options), (numbers(T, E) * 2).requires_grad_()
    scores, dweights = ExpertScores(model), numbers(T, K, seed=5)
    ids = scores.choose(logits.detach(), numbers(E, seed=9) if model.moe_router_enable_expert_bias else None)
    wanted = weights_of(model, logits, ids)
    (gradient,) = torch.autograd.grad(wanted, logits, dweights)
    found = scores.weights(logits.detach(), ids)
    assert (found - wanted).abs().max() < TOLERANCE
    assert (scores.weights_grad(dweights, found, logits.detach(), ids) - gradient).abs().max() < TOLERANCE


def test_weights_are_defined_where_scores_underflow() -> None:
    """Sigmoids of such logits are 0 in fp32, and a quotient of them would switch the experts off."""
    model = model_of(OPTIONS["sigmoid"])
    logits = torch.full((1, E), -200.0)
    logits[0, :K] = torch.tensor([-150.0, -151.0, -152.0])
    scores = ExpertScores(model)
    ids = scores.choose(logits, None)
    assert ids.tolist() == [[0, 1, 2]]
    weights = scores.weights(logits, ids)
    assert torch.allclose(weights, torch.tensor([[0.0, -1.0, -2.0]]).softmax(-1), rtol=1e-5)
    assert scores.weights_grad(torch.ones(1, K) * torch.arange(K), weights, logits, ids).isfinite().all()


@pytest.mark.second
def test_the_choice_is_that_of_transformers() -> None:
    """DeepseekV3TopkRouter, in fp32: sums of `H` products and E scores, so a few units in the last place."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    config = transformers.DeepseekV3Config(
        hidden_size=H,
        n_routed_experts=E,
        num_experts_per_tok=K,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
    )
    theirs = DeepseekV3TopkRouter(config)
    x, weight, bias = numbers(T, H).float(), numbers(E, H, seed=4).float(), numbers(E, seed=9).float() * 0.4
    theirs.weight.data.copy_(weight)
    theirs.e_score_correction_bias.copy_(bias)
    _, wanted, wanted_ids = theirs(x)
    model = model_of(OPTIONS["deepseek-v3"])
    logits = x @ weight.T
    ids = ExpertScores(model).choose(logits, bias.double())
    assert ids.sort().values.equal(wanted_ids.sort().values)
    found = torch.zeros(T, E).scatter_(1, ids, ExpertScores(model).weights(logits, ids))
    theirs_by_expert = torch.zeros(T, E).scatter_(1, wanted_ids, wanted)
    assert (found - theirs_by_expert).abs().max() < 2.5 * 8 * (H + E) * torch.finfo(torch.float32).eps


class Owner:
    """Keeps the gradient of a weight."""

    def __init__(self) -> None:
        self.gradient: torch.Tensor | None = None

    def accumulate_grad(self, weight: Weight, write: GradWriter) -> None:
        self.gradient = torch.zeros_like(weight.data)
        write(self.gradient, False)


def router_of(model: ModelConfig) -> Router:
    mesh = pretend_mesh(Layout(), 0, torch.device("cpu"), needs_staging_buffer=False)
    context = Context(ResidualStream(mesh.tp, sharded=False), MemoryTracker(), "fp64", mesh.device)
    router = Router(model, 0, context)
    router.weight.data = numbers(E, H)
    if router.bias is not None:
        router.bias.copy_(numbers(E, seed=9) * 0.4)
    return router


def two_samples(balance: Balance | None) -> MicroBatchInfo:
    return MicroBatchInfo(T // 2, (0, 1), True, (), (), balance=balance)


@EVERY
def test_balance_losses_join_the_gradient(options: dict[str, Any]) -> None:
    """Against autograd of the objective in `router`'s docstring, over two samples, one with few targets."""
    model = model_of(options | {"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.2})
    router = router_of(model)
    owner = router.weight.owner = Owner()
    x, dweights = numbers(T, H, seed=7).requires_grad_(), numbers(T, K, seed=5)
    targets, seed, length = torch.tensor([20.0, 7.0], dtype=torch.float64), torch.tensor(1 / 27).double(), T // 2
    tokens = two_samples(Balance(targets, seed))
    routed = router(x.detach(), tokens, True)
    dx = router.backward(dweights, x.detach(), routed, tokens)

    weight = router.weight.data.clone().requires_grad_()
    logits, ids = x @ weight.T, routed.choices.ids.long()
    objective = (weights_of(model, logits, ids) * dweights).sum()
    sums = [0.0, 0.0, 0.0, 0.0]
    for n, rows in zip(targets, logits.view(2, length, E), strict=True):
        raw = rows.sigmoid() if model.moe_router_score_function == "sigmoid" else rows.softmax(-1)
        shares = raw / raw.sum(-1, keepdim=True)
        f = torch.zeros(E, dtype=torch.float64)
        for row in rows.tolist():
            for i in sorted(range(E), key=row.__getitem__)[-K:]:  # without bias and groups
                f[i] += 1 / (K * length)
        aux, z = E * (f * shares.mean(0)).sum(), rows.logsumexp(-1).square().mean()
        objective = objective + n * seed * (0.3 * aux + 0.2 * z)
        sums = [
            sums[0] - float((shares * shares.log()).sum().detach()),
            0.0,  # none is dropped
            sums[2] + float((n * aux).detach()),
            sums[3] + float((n * z).detach()),
        ]
    wanted_x, wanted_weight = torch.autograd.grad(objective, (x, weight))
    assert (dx - wanted_x).abs().max() < TOLERANCE
    assert owner.gradient is not None and (owner.gradient - wanted_weight).abs().max() < TOLERANCE
    assert router.statistics[:E].tolist() == torch.bincount(ids.flatten(), minlength=E).tolist()
    assert router.statistics[E:].tolist() == pytest.approx(sums, rel=TOLERANCE)


@EVERY
def test_an_expert_takes_the_largest_weights_of_a_sample(options: dict[str, Any]) -> None:
    """Weights are those of results, without biases; loads count all choices; an evaluation drops none."""
    limited = {"moe_expert_capacity_factor": 0.6, "seq_length": T // 2}
    router, x = router_of(model_of(options | limited)), numbers(T, H, seed=7)
    room = math.ceil(0.6 * K * (T // 2) / E)
    targets = torch.tensor([20.0, 0.0], dtype=torch.float64)
    free = router(x, two_samples(None), True)
    found = router(x, two_samples(Balance(targets, torch.tensor(1.0).double())), True)
    ids, weights = found.choices.ids % E, found.weights
    assert torch.equal(ids, free.choices.ids) and torch.equal(weights, free.weights)
    kept = found.choices.ids < E
    for sample in (slice(0, T // 2), slice(T // 2, T)):
        for e in range(E):
            mine = [
                (w, k)
                for row in zip(ids[sample], weights[sample], kept[sample], strict=True)
                for i, w, k in zip(*(part.tolist() for part in row), strict=True)
                if i == e
            ]
            assert [k for _, k in sorted(mine, reverse=True)] == [place < room for place in range(len(mine))]
    first = slice(0, T // 2)  # the other sample has no targets
    assert router.statistics[:E].tolist() == torch.bincount(ids[first].flatten(), minlength=E).tolist()
    assert router.statistics[E + 1] == (~kept[first]).sum() > 0
    assert found.choices.dispatch.sends == [int(kept.sum())] and free.choices.dispatch.sends == [T * K]
