"""Every family is the same model in every layout: losses and norms of plain PyTorch in fp64, and bytes as estimated."""

from dataclasses import replace

import pytest

from tests.helpers.families import SMALL, family
from tests.parallel.cases import MODEL, Case, train
from tests.parallel.matrix import COMBINED
from tests.parallel.test_parity import TOLERANCE, check_bytes, expected, fp64, relative_error

LAYOUTS = [
    Case(tp=2, sp=True, recompute="selective", reset="documents"),
    Case(dp=2, zero=3, recompute="full"),
    Case(pp=2, tp=2, zero=1, schedule="zero-bubble", micro_batches=3),
    Case(tp=4, recompute="full"),
]
# Levels of the matrix; and families whose parts others have, which on one rank are transformers' (tests/unit).
SLOW = (*COMBINED, "gpt2", "llama", "mistral", "qwen2", "phi3", "olmo2", "starcoder2", "gemma")
SLOW += ("mixtral", "qwen3-moe", "deepseek-v2")


@pytest.mark.second
@pytest.mark.parametrize(
    ("name", "case"),
    [
        # in the default suite, other families in one layout
        pytest.param(name, case, marks=pytest.mark.slow if number or name in SLOW else ())
        for name in SMALL
        for number, case in enumerate(LAYOUTS)
    ],
    ids=str,
)
def test_every_layout_of_a_family_is_the_same_model(name: str, case: Case, ranks) -> None:
    model = replace(family(name, MODEL), num_layers=4 if case.pp > 1 else 3, hidden_dropout=0.1 if case.sp else 0.0)
    case = fp64(case._replace(model=replace(model, num_attention_heads=8, hidden_size=64) if case.tp == 4 else model))
    losses, norms = expected(case)
    outcomes = ranks(case.world).run(train, case)
    for outcome in outcomes:
        assert relative_error(outcome.losses, losses) < TOLERANCE
        assert relative_error(outcome.norms, norms) < TOLERANCE
    check_bytes(case, outcomes)
