"""Muon: the same update in every layout, with whole matrices owned by one rank each."""

from dataclasses import replace

import pytest

from megazero.planner.bytes.estimate import estimate
from tests.helpers.families import of_family
from tests.helpers.rings import by_default
from tests.parallel.cases import MODEL, Case, train
from tests.parallel.test_parity import SHALLOW, WITH_MUON, check_balance, check_bytes, expected, fp64, relative_error

LLAMA = replace(SHALLOW, **of_family("llama"), num_query_groups=2)
EXPERTS = replace(
    SHALLOW,
    **of_family("qwen2-moe"),
    num_query_groups=2,
    num_experts=4,
    moe_ffn_hidden_size=24,
    moe_shared_expert_intermediate_size=36,
    moe_shared_expert_gate=True,
    seq_length=12,
)


def muon(**changes: object) -> Case:
    return fp64(Case(optimizer="muon", **({"model": LLAMA} | changes)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "case",
    by_default(
        [
            muon(),
            muon(model=SHALLOW),
            *(muon(dp=2, zero=zero, model=SHALLOW) for zero in (1, 2, 3)),
            muon(dp=3, zero=3, options=(("reduce_bucket_size", 3000),)),
            muon(dp=4, zero=2, micro_batches=3),
            muon(tp=2, zero=0, sp=True),
            muon(tp=2, model=SHALLOW),
            muon(dp=2, tp=2, zero=3),
            muon(dp=2, tp=2, zero=1, options=(("zero_shard_size", 2),)),
            muon(pp=2, dp=2, zero=2, model=replace(MODEL, num_layers=3)),
            muon(dp=2, zero=2, frozen=("blocks.0.*", "*.mlp.down.*")),
            muon(dp=2, zero=3, model=EXPERTS),
            muon(dp=2, ep=2, zero=2, model=EXPERTS),
            muon(tp=2, etp=1, dp=2, ep=2, zero=1, model=EXPERTS, sp=True),
            muon(tp=2, dp=2, ep=2, zero=3, model=EXPERTS, sp=True),
        ],
        *(3, 9, 11),
    ),
    ids=str,
)
def test_every_layout_makes_the_same_updates(case: Case, ranks) -> None:
    losses, norms = expected(case)
    outcomes = ranks(case.world).run(train, case)
    for outcome in outcomes:
        assert relative_error(outcome.losses, losses) < WITH_MUON
        assert relative_error(outcome.norms, norms) < WITH_MUON
    check_bytes(case, outcomes)
    check_balance(case, outcomes)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("bucket", [40_000_000, 3000])
def test_ranks_send_together_as_many_bytes_as_with_adamw(zero: int, bucket: int) -> None:
    """Over dp 4, on paper; `check_bytes` compares paper with runs."""
    of_muon = muon(dp=4, zero=zero, model=SHALLOW, options=(("reduce_bucket_size", bucket),))
    sent = [
        [estimate(case.config(), case.layout, rank).traffic["dp"] for rank in range(4)]
        for case in (of_muon, of_muon._replace(optimizer="adamw"))
    ]
    assert sum(sent[0]) == sum(sent[1]) > 0
    assert len(set(sent[0])) > 1 == len(set(sent[1]))  # ranks that own more send less
