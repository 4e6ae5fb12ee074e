"""Mixture of experts in every layout: losses, gradient norms, loads and balance losses of plain PyTorch."""

import math
from dataclasses import replace

import pytest
import torch

from megazero.engine.model.layers.context import DTYPES
from tests.helpers.families import of_family
from tests.helpers.rings import SECOND, by_default
from tests.parallel import matrix
from tests.parallel.cases import MODEL, STEPS, Case, train
from tests.parallel.test_parity import (
    check_averaged,
    check_balance,
    check_bytes,
    check_layers,
    check_near,
    expected,
    expected_balance,
    fp64,
    parameters,
    relative_error,
    tolerance,
)

LLAMA = replace(MODEL, num_layers=3, **of_family("llama"), num_query_groups=2, ffn_hidden_size=36)
BALANCED = {"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.2}
RENORMALISED = replace(LLAMA, num_experts=4, **BALANCED)
SHARED = replace(
    LLAMA,
    num_experts=5,
    moe_router_topk=3,
    moe_router_pre_softmax=True,
    moe_ffn_hidden_size=24,
    moe_shared_expert_intermediate_size=12,
    moe_layer_freq="DE",
    **BALANCED,
)
GATED = replace(RENORMALISED, moe_shared_expert_intermediate_size=24, moe_shared_expert_gate=True, moe_layer_freq="2")
MANY = replace(LLAMA, num_experts=97, moe_ffn_hidden_size=6, **BALANCED)  # more than the choices of a step
SIX = replace(SHARED, num_experts=6, moe_layer_freq="1")
DROPPING = replace(RENORMALISED, moe_expert_capacity_factor=0.6)
EVEN = replace(DROPPING, seq_length=12)  # ranks have halves of a sample
UNBALANCED = replace(RENORMALISED, moe_aux_loss_coeff=0.0)


def check(case: Case, ranks) -> None:
    losses, norms = expected(case)
    outcomes = ranks(case.world).run(train, case)
    for outcome in outcomes:
        assert relative_error(outcome.losses, losses) < tolerance(case)
        assert relative_error(outcome.norms, norms) < tolerance(case)
    check_averaged(case, outcomes)
    check_layers(case, outcomes)
    check_balance(case, outcomes)
    check_bytes(case, outcomes)


CASES = {
    "one rank": Case(model=RENORMALISED, micro_batches=1),
    "three micro-batches": Case(model=SHARED, micro_batches=3),
    "drops": Case(model=DROPPING, micro_batches=3, recompute="full", targets="uneven"),
    "drops, cp": Case(model=DROPPING, cp=2, micro_batches=3, recompute="full", reset="documents", targets="uneven"),
    "drops, tokens over tp": Case(model=EVEN, tp=2, sp=True, etp=1, micro_batches=3, batch=9, zero=2),
    "drops, all": Case(model=EVEN, cp=2, tp=2, sp=True, ep=4, etp=1, recompute="full", micro_batches=3, batch=9),
    "drops, all experts": Case(model=replace(DROPPING, moe_router_topk=4), tp=2, dp=2, sp=True, ep=2, micro_batches=3),
    "no auxiliary loss": Case(model=UNBALANCED, recompute="full", reset="documents", targets="uneven"),
    "tp": Case(model=GATED, tp=2, sp=True, recompute="full", micro_batches=3),
    "cp": Case(model=GATED, cp=2, recompute="selective", reset="documents", targets="uneven"),
    "dp 3": Case(model=RENORMALISED, dp=3, zero=3, micro_batches=3, batch=8, micro_batch_size=1, targets="uneven"),
    "more experts than choices": Case(model=MANY, dp=2, zero=3, batch=2, micro_batches=1),
    "replicas of experts alone": Case(model=RENORMALISED, tp=2, sp=True, etp=1, zero=3, micro_batches=3),
    "ep": Case(model=GATED, tp=2, dp=2, sp=True, ep=2, etp=1, zero=3, recompute="full", micro_batches=3),
    "ep x etp": Case(model=SIX, tp=2, dp=2, sp=True, ep=2, zero=1, micro_batches=3, targets="uneven"),
}


BY_DEFAULT = ("one rank", "dp 3", "more experts than choices", "ep x etp")
DEAR = ("drops, all", "ep")  # on four ranks; the matrix has their pairs of options


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Generate cases when pytest collects tests, and not when a rank imports this module."""
    if metafunc.function is test_every_layout_has_the_same_experts:
        rings = {name: () if name in BY_DEFAULT else pytest.mark.slow if name in DEAR else SECOND for name in CASES}
        by_hand = [pytest.param(fp64(case), id=name, marks=rings[name]) for name, case in CASES.items()]
        metafunc.parametrize("case", [*by_hand, *parameters(matrix.with_experts())])


def test_every_layout_has_the_same_experts(case: Case, ranks) -> None:
    check(case, ranks)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_rank_whose_experts_get_no_token(recompute: str, ranks) -> None:
    """Two tokens a step, each with one of 64 experts, on two ranks."""
    model = replace(
        LLAMA, seq_length=1, num_experts=64, moe_router_topk=1, moe_router_pre_softmax=True, moe_ffn_hidden_size=6
    )
    case = fp64(Case(model=model, dp=2, ep=2, zero=2, batch=2, micro_batches=1, recompute=recompute))
    check(case, ranks)
    (outcome, _) = ranks(2).run(train, case)
    loads = [loads for step in outcome.experts if step is not None for loads in step.choices]
    assert min(min(sum(each[:32]), sum(each[32:])) for each in loads) == 0
    assert all(sum(each) == 2 for each in loads)


# In 16 bit rounding decides between near ties. Here it cannot: a few tokens, whose embeddings are most of the residual
# stream, choose far apart scores. In later steps too if nothing that they depend on trains.
CLEAR = replace(
    LLAMA,
    num_layers=2,
    vocab_size=6,
    embedding_multiplier=30.0,
    num_experts=4,
    moe_ffn_hidden_size=24,
    moe_layer_freq="ED",
    **BALANCED,
)
SAME_SCORES = ("token_embedding.*", "*.norm2.*", "*.router.*")
CLEAR_CASES = [
    Case(model=CLEAR, precision="bf16", grad_dtype="bf16", recompute="full", micro_batches=3),
    Case(model=CLEAR, precision="fp16", dp=2, ep=2, zero=3),
    Case(model=CLEAR, precision="bf16", tp=2, sp=True, ep=2, etp=1, recompute="full"),
    Case(model=CLEAR, precision="bf16", cp=2, ep=2, zero=1, recompute="selective"),
    Case(model=CLEAR, precision="fp16", tp=2, sp=True),
    Case(model=CLEAR, precision="bf16", pp=2, dp=2, ep=2, zero=2, micro_batches=3),
    Case(model=CLEAR, precision="fp16", grad_dtype="fp16", dp=2, tp=2, sp=True, ep=2, zero=3, micro_batches=3),
]


@pytest.mark.parametrize(("frozen", "steps"), [((), 1), (SAME_SCORES, STEPS)], ids=["all train", "same scores"])
@pytest.mark.parametrize("case", by_default(CLEAR_CASES, 1), ids=str)
def test_clear_choices_are_those_of_fp64(case: Case, frozen: tuple[str, ...], steps: int, ranks) -> None:
    """Losses and norms are as near as a dense model's, and loads are equal."""
    case = case._replace(frozen=frozen)
    wanted = expected_balance(case)[:steps]
    # Rounded are the weights of table and router, the stream twice and its norm: each by half of eps of the h summands
    # of a logit, whose absolute values sum to sqrt(h) of its size by Cauchy and Schwarz. Two logits may come nearer.
    rounding = 2 * 5 * torch.finfo(DTYPES[case.precision]).eps / 2 * math.sqrt(case.model.hidden_size)
    assert min(step.margin for step in wanted) > rounding
    outcomes = ranks(case.world).run(train, case, steps)
    for outcome in outcomes:
        assert [each.choices for each in outcome.experts if each is not None] == [step.choices for step in wanted]
    check_near(case, outcomes)
