"""Router and experts by themselves, against loops over tokens and experts in plain PyTorch.

Shapes: b samples, s tokens of a sample, T = b s tokens, E experts, k experts of a token, h hidden, f inner width.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from megazero.engine.kernels.grouped import GroupedProducts, RowGroups
from megazero.engine.kernels.matmul import TORCH
from megazero.engine.memory.tracker import MemoryTracker
from megazero.engine.model.dispatch import Balance
from megazero.engine.model.experts.experts import Experts
from megazero.engine.model.experts.router import Router
from megazero.engine.model.layers.context import Context, MicroBatchInfo, ResidualStream
from megazero.engine.model.layers.linear import Residual
from megazero.engine.model.layers.norm import NORMS, NoNorm
from megazero.engine.model.layers.weight import named_weights
from megazero.engine.plan.layout.topology import Layout
from megazero.flags.config import ModelConfig
from megazero.planner.trace.pretend import pretend_mesh
from megazero.planner.trace.trace import model_flops
from tests.helpers.families import of_family
from tests.helpers.rounding import assert_sum, error_bound, model_tolerance
from tests.helpers.table import for_each
from tests.unit.engine.model.test_linear import CPU, Collected, plain_norm

B, S, H = 3, 4, 6
SEED = 0.37  # d objective / d loss
TARGETS = torch.tensor([4.0, 0.0, 3.0], dtype=torch.float64)
MODEL = ModelConfig(
    *(1, H, 5, 2, S, 11),
    **of_family("llama"),
    num_experts=4,
    moe_aux_loss_coeff=0.3,
    moe_z_loss_coeff=0.2,
)
MODELS = {
    "renormalised": MODEL,
    "no balance": replace(MODEL, moe_aux_loss_coeff=0.0, moe_z_loss_coeff=0.0),
    "aux alone, all experts": replace(MODEL, moe_router_topk=4, moe_z_loss_coeff=0.0),
    "probabilities, shared": replace(
        MODEL, moe_router_topk=3, moe_router_pre_softmax=True, moe_shared_expert_intermediate_size=7
    ),
    "one expert, gated": replace(
        MODEL,
        num_experts=7,
        moe_router_topk=1,
        moe_router_pre_softmax=True,
        moe_ffn_hidden_size=3,
        moe_aux_loss_coeff=0.0,
        moe_shared_expert_intermediate_size=8,
        moe_shared_expert_gate=True,
    ),
    "dropping": replace(MODEL, moe_expert_capacity_factor=1.0),
    "dropping, one of four, shared": replace(
        MODEL, moe_router_topk=3, moe_expert_capacity_factor=0.3, moe_shared_expert_intermediate_size=7
    ),
    "norms around, geglu": replace(MODEL, **of_family("gemma2"), residual_multiplier=0.3),
    "biases, clamped": replace(MODEL, **of_family("gpt-oss"), moe_router_topk=3),
    "layernorm, more experts than choices": replace(MODEL, **of_family("stablelm"), num_experts=40),
}


def context_of(precision: str = "fp64", **options: Any) -> Context:
    stream = ResidualStream(pretend_mesh(Layout(), 0, CPU, needs_staging_buffer=False).tp, sharded=False)
    return Context(stream, MemoryTracker(), precision, CPU, **options)


def micro_batch(balance: Balance | None) -> MicroBatchInfo:
    return MicroBatchInfo(S, tuple(range(B)), True, (), (), balance=balance)


def activated(model: ModelConfig, inner: torch.Tensor) -> torch.Tensor:
    gate, value = inner.chunk(2)
    if model.architecture == "gpt-oss":
        gate = gate.clamp(max=7)
        return gate * torch.sigmoid(1.702 * gate) * (value.clamp(-7, 7) + 1)
    return (F.gelu(gate, approximate="tanh") if model.architecture == "gemma2" else F.silu(gate)) * value


def plain_experts(model: ModelConfig, y: torch.Tensor, w: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """y [T, h] -> the result [T, h], and the balance losses times their factors, summed over samples by targets."""
    logits, results, chosen = y @ w["mlp.router.weight"].T + w.get("mlp.router.logit_bias", 0.0), [], []
    up_bias, down_bias = (
        w.get(f"mlp.experts.{name}.bias", torch.zeros(model.num_experts, 1)) for name in ("up", "down")
    )
    for row in logits:
        chosen.append(sorted(range(model.num_experts), key=lambda e: -row[e].item())[: model.moe_router_topk])
    weights = [
        row.exp() / (row if model.moe_router_pre_softmax else row[experts]).exp().sum()
        for row, experts in zip(logits, chosen, strict=True)
    ]
    capacity = math.ceil(S * model.moe_router_topk / model.num_experts * model.moe_expert_capacity_factor) or S
    for number, (token, experts) in enumerate(zip(y, chosen, strict=True)):
        sample, total = range(number // S * S, number // S * S + S), torch.zeros_like(token)
        for e in experts:
            weight = weights[number][e]
            if sum(e in chosen[other] and weights[other][e] > weight for other in sample) >= capacity:
                continue  # it has no room for the token
            inner = activated(model, w["mlp.experts.up.weight"][e].reshape(-1, H) @ token + up_bias[e].flatten())
            total = total + weight * (w["mlp.experts.down.weight"][e] @ inner + down_bias[e])
        if model.moe_shared_expert_intermediate_size:
            inner = activated(model, w["mlp.shared.up.weight"].reshape(-1, H) @ token)
            gate = (w["mlp.shared_gate.weight"][0] @ token).sigmoid() if model.moe_shared_expert_gate else 1.0
            total = total + gate * (w["mlp.shared.down.weight"] @ inner)
        results.append(total)
    loss = torch.zeros((), dtype=y.dtype)
    for sample, targets in enumerate(TARGETS.tolist()):
        rows = logits[sample * S : (sample + 1) * S]
        all_chosen = [e for experts in chosen[sample * S : (sample + 1) * S] for e in experts]
        for e in range(model.num_experts):
            share, mean = all_chosen.count(e) / len(all_chosen), rows.softmax(1)[:, e].mean()
            loss = loss + targets * model.moe_aux_loss_coeff * model.num_experts * share * mean
        loss = loss + targets * model.moe_z_loss_coeff * rows.exp().sum(1).log().square().mean()
    return torch.stack(results), loss


def compare(name: str, precision: str, tolerance: float, frozen: tuple[str, ...] = (), **options: Any) -> None:
    """Compare the result and all gradients with plain PyTorch's in fp64, relative to each tensor's largest element."""
    model, needs_dx, context = MODELS[name], options.pop("needs_dx", True), context_of(precision, **options)
    before, kind = model.norm_place != "after", model.norm
    layers = nn.ModuleDict({"mlp": Experts(model, 0, context)})
    layers["norm"] = NORMS[kind](model, context) if before else NoNorm()
    after = layers["after"] = NORMS[kind](model, context) if model.norm_place != "before" else None
    owner, generator = Collected(), torch.Generator().manual_seed(0)
    weights = {weight.spec.name[2:]: weight for weight in named_weights(layers, "l", tuple(f"l.{f}" for f in frozen))}
    for weight in weights.values():
        weight.data = torch.randn(weight.block.stored, generator=generator, dtype=torch.float64).to(context.dtype)
        weight.owner = owner
    x, dy = (torch.randn(B * S, H, generator=generator, dtype=torch.float64).to(context.dtype) for _ in range(2))
    x.requires_grad_(needs_dx)
    residual = Residual(context.dropout(0.0, 0, "mlp"), after, model.residual_multiplier)
    tokens = micro_batch(Balance(TARGETS, torch.tensor(SEED, dtype=torch.float64)))
    given = dy.clone()
    y = layers["mlp"](x, layers["norm"], residual, tokens, True)
    y.backward(given)

    theirs = {name: weight.data.double().requires_grad_() for name, weight in weights.items()}
    leaf = x.detach().double().requires_grad_()
    result, loss = plain_experts(model, plain_norm(kind, leaf, theirs, "norm"), theirs)
    wanted = leaf + model.residual_multiplier * plain_norm(kind if after else "", result, theirs, "after")
    ((wanted * dy.double()).sum() + SEED * loss).backward()
    assert torch.equal(given, dy)
    assert (x.grad is not None) == needs_dx
    assert set(owner) == {weight for weight in weights.values() if weight.trains}
    pairs = [("y", y.detach(), wanted.detach())]
    pairs += [("x", x.grad, leaf.grad)] if x.grad is not None else []
    pairs += [(name, owner[weight], theirs[name].grad) for name, weight in weights.items() if weight.trains]
    for label, ours, exact in pairs:
        assert bool(((ours.double() - exact).abs() <= tolerance * exact.abs().max()).all()), label


@for_each("frozen", [(), ("mlp.router.*",), ("mlp.experts.*",), ("norm.*", "after.*", "mlp.shared*")])
@for_each(("needs_dx", "selective"), [(True, False), (True, True), (False, True)])
@for_each("name", MODELS)
def test_experts_are_one_function(name: str, needs_dx: bool, selective: bool, frozen: tuple[str, ...]) -> None:
    """Flags: --moe-router-pre-softmax, --moe-aux-loss-coeff, --moe-z-loss-coeff. One of the samples has no target."""
    compare(name, "fp64", 1e-12, frozen, needs_dx=needs_dx, selective=selective)


@for_each("name", MODELS)
def test_fp32_differs_by_rounding(name: str) -> None:
    compare(name, "fp32", model_tolerance(MODELS[name], torch.float32))


def routed(model: ModelConfig, context: Context) -> tuple[Router, torch.Tensor]:
    router, generator = Router(model, 0, context), torch.Generator().manual_seed(1)
    (weight,) = named_weights(router, "l", ())
    weight.data = torch.randn(weight.block.stored, generator=generator, dtype=context.dtype)
    return router, torch.randn(B * S, H, generator=generator, dtype=context.dtype)


def test_a_recompute_takes_the_choices_of_its_forward_and_counts_nothing() -> None:
    """Its input may differ by rounding, which could choose other experts."""
    router, x = routed(MODEL, context_of(recomputed=frozenset([0])))
    balance = Balance(TARGETS, torch.tensor(1.0, dtype=torch.float64))
    tokens = micro_batch(balance)
    first = router(x, tokens, False)
    counted = router.statistics.clone()
    again = router(-x, tokens, True)
    assert torch.equal(again.choices.ids, first.choices.ids) and torch.equal(again.choices.counts, first.choices.counts)
    assert torch.equal(again.weights, (-first.logits).gather(1, first.choices.ids.long()).softmax(-1))
    assert torch.equal(router.statistics, counted)
    assert not torch.equal(router(-x, tokens, True).choices.ids, first.choices.ids), "choices are taken once"


def test_only_samples_with_targets_are_counted() -> None:
    router, x = routed(MODEL, context_of())
    routed_ = router(x, micro_batch(Balance(TARGETS, torch.tensor(1.0, dtype=torch.float64))), True)
    real = torch.arange(B * S) // S != 1
    *loads, entropy, dropped, aux, z = router.statistics.tolist()
    assert loads == routed_.choices.ids[real].flatten().bincount(minlength=4).tolist()
    exact = torch.distributions.Categorical(logits=routed_.logits[real]).entropy().sum().item()
    assert entropy == pytest.approx(exact, rel=1e-12) and dropped == 0
    factors = (
        replace(MODEL, moe_aux_loss_coeff=1.0, moe_z_loss_coeff=0.0),
        replace(MODEL, moe_aux_loss_coeff=0.0, moe_z_loss_coeff=1.0),
    )
    weights = {
        "mlp.router.weight": router.weight.data,
        "mlp.experts.up.weight": torch.zeros(4, 2, 5, H).double(),
        "mlp.experts.down.weight": torch.zeros(4, H, 5).double(),
    }
    for found, model in zip((aux, z), factors, strict=True):
        assert found == pytest.approx(plain_experts(model, x, weights)[1].item(), rel=1e-12)
    router(x, micro_batch(None), True)  # an evaluation
    assert router.statistics.tolist() == [*loads, entropy, dropped, aux, z]


def test_equal_probabilities_are_balanced() -> None:
    """The balance loss is 1 for all choices, the entropy log E, and the z-loss its square."""
    router, x = routed(replace(MODEL, num_experts=5, moe_router_topk=3), context_of())
    router.weight.data.zero_()
    router(x, micro_batch(Balance(TARGETS, torch.tensor(1.0, dtype=torch.float64))), True)
    entropy, _, aux, z = router.statistics[5:].tolist()
    assert entropy == pytest.approx(2 * S * math.log(5), rel=1e-14)
    assert aux == pytest.approx(7, rel=1e-14) and z == pytest.approx(7 * math.log(5) ** 2, rel=1e-14)


def test_equal_weights_are_taken_in_order() -> None:
    """Weights that differ by rounding are equal."""
    router, x = routed(replace(MODEL, moe_expert_capacity_factor=0.5), context_of())
    x = x[0] * (1 + 1e-14 * torch.arange(B * S, dtype=x.dtype)[:, None])
    tokens = micro_batch(Balance(TARGETS, torch.tensor(1.0, dtype=torch.float64)))
    kept = (router(x, tokens, True).choices.ids < 4).view(B, S, 2)
    assert kept[:, 0].all() and not kept[:, 1:].any()


SIZES = [(3, 0, 5, 1), (0, 0, 0, 9), (0, 4, 0, 0), (2, 2, 2, 2)]


@for_each("fused", [False, True])
@for_each("dtype", [torch.float32, torch.bfloat16])
@for_each("sizes", SIZES)
def test_grouped_products_are_those_of_each_group(sizes: tuple[int, ...], dtype: torch.dtype, fused: bool) -> None:
    """The loop, and torch's grouped kernel, which runs on a CPU too; empty groups have a gradient of 0."""
    generator, rows, wide, narrow = torch.Generator().manual_seed(2), sum(sizes), 16, 8
    counts = torch.tensor(sizes)
    x, dy, weight = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((rows, wide), (rows, narrow), (4, narrow, wide))
    )
    groups, products = RowGroups.of(counts, None if fused else sizes), GroupedProducts(TORCH)
    of = torch.arange(4).repeat_interleave(counts)
    matrices = weight.double()[of]  # of each row

    def both(left: torch.Tensor, right: torch.Tensor, equation: str) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = left.double(), right.double()
        return torch.einsum(equation, a, b), torch.einsum(equation, a.abs(), b.abs())

    assert_sum(products.output(x, weight, groups), *both(matrices, x, "roi,ri->ro"), wide, torch.float32)
    assert_sum(products.input_grad(dy, weight, groups), *both(matrices, dy, "roi,ro->ri"), narrow, torch.float32)
    hot = F.one_hot(of, 4).double()
    exact, magnitude = both(dy[:, None, :] * hot[..., None], x, "reo,ri->eoi")
    gradient = torch.full_like(weight, torch.nan, dtype=torch.float32)
    products.weight_grad(groups, x, dy, gradient, False)
    stored = dtype if fused else None  # torch's kernel returns the type of its factors
    bound = error_bound(magnitude, max(1, rows), torch.float32, stored)
    assert bool(((gradient - exact).abs() <= bound).all())
    gradient.fill_(1.0)
    products.weight_grad(groups, x, dy, gradient, True)
    bound = error_bound(magnitude + 1, rows + 1, torch.float32, stored)
    assert bool(((gradient - 1 - exact).abs() <= bound).all())


def test_flops_are_those_of_the_parameters_that_a_token_meets() -> None:
    """Two layers of six heads of width 8, dense and with experts: products of 17 tokens, and attention."""
    model = ModelConfig(
        **of_family("qwen3-moe"),
        num_layers=2,
        hidden_size=48,
        ffn_hidden_size=40,
        num_attention_heads=6,
        num_query_groups=3,
        seq_length=17,
        vocab_size=100,
        num_experts=8,
        moe_router_topk=3,
        moe_ffn_hidden_size=24,
        moe_layer_freq="DE",
        moe_shared_expert_intermediate_size=16,
        moe_shared_expert_gate=True,
        untie_embeddings=True,
    )
    attention, dense = 48 * (6 + 3 + 3) * 8 + 48 * 48, 3 * 48 * 40
    experts = 3 * (3 * 48 * 24) + 48 * 8 + 3 * 48 * 16 + 48  # three experts, router, shared expert, gate
    matrices, scores = 2 * attention + dense + experts + 48 * 100, 2 * (2 * 17 * 48)
    assert model_flops(model, 5) == 3 * 5 * 17 * 2 * (matrices + scores)
