"""Moments in 16 and 8 bits, and split master weights: the same run in every layout, in fewer bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.parallel.cases import MODEL, Case, train
from tests.parallel.test_parity import TOLERANCE, check_bytes, expected, relative_error

# Rows of most matrices are whole blocks of 32; those of `odd` are not. A head's 32 columns, or 2 x 32 on a rank.
WIDE = replace(MODEL, hidden_size=96, kv_channels=32, num_layers=2)
LLAMA = replace(WIDE, architecture="llama", num_query_groups=2, ffn_hidden_size=192)
EXPERTS = replace(
    LLAMA,
    num_experts=4,
    moe_ffn_hidden_size=64,
    moe_aux_loss_coeff=0.1,
)


def case_of(moments: str, **changes: object) -> Case:
    return Case(precision="fp64", moments=moments, **{"model": WIDE, "micro_batches": 1} | changes)  # type: ignore[arg-type]


CASES = [
    case_of("int8"),
    case_of("bf16"),
    case_of("int8", optimizer="muon"),
    case_of("bf16", dp=2, zero=1, micro_batches=2),
    case_of("int8", dp=3, zero=3, model=LLAMA, options=(("reduce_bucket_size", 3000),)),
    case_of("int8", dp=2, tp=2, zero=2, sp=True),
    case_of("bf16", tp=2, model=LLAMA, zero=1),
    case_of("int8", tp=3, model=WIDE),
    case_of("int8", pp=2, dp=2, zero=1, model=LLAMA, micro_batches=2),
    case_of("int8", dp=2, tp=2, zero=3, ep=2, etp=2, sp=True, model=EXPERTS),
    case_of("bf16", dp=2, tp=2, zero=1, ep=4, etp=1, sp=True, model=EXPERTS),
    case_of("int8", dp=4, zero=2, optimizer="muon"),
    case_of("bf16", dp=2, tp=2, zero=1, optimizer="muon", model=LLAMA),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_layout_rounds_moments_alike(case: Case, ranks) -> None:
    """As plain PyTorch, with moments that are rounded by numpy."""
    losses, norms = expected(case)
    outcomes = ranks(case.world).run(train, case)
    for outcome in outcomes:
        assert relative_error(outcome.losses, losses) < TOLERANCE
        assert relative_error(outcome.norms, norms) < TOLERANCE
    check_bytes(case, outcomes)
