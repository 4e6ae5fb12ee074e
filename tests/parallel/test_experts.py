"""Mixture of experts in every layout: losses, gradient norms, loads and balance losses of plain PyTorch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.parallel.cases import MODEL, Case, train
from tests.parallel.test_parity import TOLERANCE, check_balance, check_bytes, expected, fp64, relative_error

LLAMA = replace(MODEL, num_layers=3, architecture="llama", num_query_groups=2, ffn_hidden_size=36)
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
UNBALANCED = replace(RENORMALISED, moe_aux_loss_coeff=0.0)


def check(case: Case, ranks) -> None:
    losses, norms = expected(case)
    outcomes = ranks(case.world).run(train, case)
    for outcome in outcomes:
        assert relative_error(outcome.losses, losses) < TOLERANCE
        assert relative_error(outcome.norms, norms) < TOLERANCE
    check_balance(case, outcomes)
    check_bytes(case, outcomes)


@pytest.mark.parametrize(
    "case",
    [
        fp64(case)
        for case in (
            Case(model=RENORMALISED, micro_batches=1),
            Case(model=SHARED, micro_batches=3),
            Case(model=GATED, targets="uneven", micro_batches=2),
            Case(model=UNBALANCED, recompute="full", reset="documents", targets="uneven"),
            Case(model=GATED, tp=2, sp=True, recompute="full", micro_batches=3),
            Case(model=GATED, cp=2, recompute="selective", reset="documents", targets="uneven"),
            Case(model=SHARED, pp=2, dp=2, zero=2, micro_batches=3),
            Case(model=SHARED, dp=2, zero=3, recompute="full", targets="uneven"),
            Case(model=GATED, pp=2, schedule="zero-bubble", micro_batches=4),
            Case(model=MANY, dp=2, zero=3, batch=2, micro_batches=1, targets="uneven"),
            Case(model=RENORMALISED, dp=3, zero=3, micro_batches=3, batch=8, micro_batch_size=1, targets="uneven"),
        )
    ],
    ids=str,
)
def test_every_layout_has_the_same_experts(case: Case, ranks) -> None:
    check(case, ranks)
