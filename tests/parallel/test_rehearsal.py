"""Three witnesses of a rank's bytes agree to the byte: real gloo ranks, `--rehearse`, and `planner.bytes.estimate`.

The fourth, formulas written down from papers, is in tests/unit/engine/plan/test_closed_formulas.py and
benchmarks/tests/test_paper.py.
"""

from dataclasses import replace
from typing import Any

import pytest

from megazero.command.rehearsal.rehearsal import RehearsalDevice, rehearse_rank
from tests.helpers.families import of_family
from tests.helpers.rings import by_default
from tests.parallel.cases import MODEL, Case, train

UNTIED = replace(MODEL, untie_embeddings=True)
LLAMA = replace(UNTIED, **of_family("llama"), num_query_groups=2, add_qkv_bias=True)
# All experts of a token: as many rows for each, as a plan assumes.
EXPERTS = replace(LLAMA, num_layers=2, num_experts=4, moe_router_topk=4, moe_ffn_hidden_size=24, moe_aux_loss_coeff=0.1)

SHALLOW = replace(MODEL, num_layers=3)  # operations on stand-in tensors take their time

# The slow ones are the product of ZeRO's stages and ZeRO-R's options, and of schedules, layouts and architectures.
BF16: dict[str, Any] = {"precision": "bf16", "grad_dtype": "bf16"}
CASES = [
    Case(dp=2, tp=2, zero=2, recompute="full", pa=True, host=True, md=True, model=SHALLOW, **BF16),
    Case(dp=3, zero=2, micro_batches=3, batch=8, micro_batch_size=1, model=SHALLOW),
    Case(cp=2, zero=3, model=replace(LLAMA, num_layers=2), recompute="selective"),
    Case(dp=2, zero=1, precision="bf16", model=SHALLOW, offload=1.0, disk=True),
    Case(tp=2, sp=True, ep=2, etp=1, zero=2, model=EXPERTS, recompute="full"),
]
SLOW = [
    Case(pp=2, dp=2, zero=3, recompute="selective", model=LLAMA, micro_batches=3),
    Case(cp=3, zero=3, model=replace(LLAMA, num_layers=2), recompute="selective"),
    Case(dp=2, zero=2, precision="bf16", micro_batches=3, model=SHALLOW, offload=0.7),
    Case(cp=2, tp=2, zero=1, model=LLAMA, exchange="ring", sp=True, recompute="full"),
    Case(pp=2, tp=2, zero=1, recompute="full", md=True, sp=True, schedule="gpipe", micro_batches=3),
    Case(dp=4, zero=1, batch=16, options=(("zero_shard_size", 2), ("reduce_bucket_size", 1000))),
]
SLOW += [
    Case(dp=2, tp=2, zero=zero, recompute="full", micro_batches=3, **how)
    for zero in range(4)
    for how in ({"pa": True}, {"pa": True, "host": True}, {"pa": True, "md": True}, {"host": True, "md": True}, {})
]
SLOW += [
    Case(dp=4, zero=zero, recompute=r, model=LLAMA, batch=16)
    for zero in range(4)
    for r in ("none", "selective", "full")
]
SLOW += [Case(pp=2, tp=2, sp=True, recompute=r, model=m) for r in ("none", "full") for m in (MODEL, LLAMA)]
SLOW += [
    Case(pp=2, dp=2, zero=zero, schedule=s, chunks=c, model=replace(UNTIED, num_layers=6), micro_batches=2)
    for zero in (1, 3)
    for s, c in (("interleaved", 2), ("zero-bubble", 1), ("zero-bubble-v", 2))
]


@pytest.mark.parametrize(
    "case", [*by_default(CASES, 1), *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=str
)
def test_real_ranks_the_rehearsal_and_the_estimate_agree(case: Case, ranks) -> None:
    """Every kind, at rest and at the peak, and traffic: of the last rank, and of the first of a slow case."""
    outcomes = ranks(case.world).run(train, case, 2)
    config, layout = case.resolved()
    for rank in (case.world - 1, 0)[: 1 + (case in SLOW)]:
        found = rehearse_rank(config, layout, rank, RehearsalDevice.of("cpu"))
        assert found.memory == outcomes[rank].memory[-1] == found.estimated_memory
        assert found.traffic == outcomes[rank].sent[-1] == found.estimated_traffic
        for kind, num_bytes in found.traffic.items():
            assert kind in ("pcie", "nvme") or num_bytes == sum(
                each.num_bytes for each in found.collectives if each.kind == kind
            )
        assert found.allocated >= found.memory["peak"] - found.memory["host"]
