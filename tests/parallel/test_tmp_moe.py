from dataclasses import replace
import pytest, torch
from megazero.price.bytes.estimate import estimate
from tests.parallel.cases import MODEL, Case, train

M = replace(
    MODEL,
    num_layers=3,
    seq_length=12,
    architecture="mixtral",
    ffn_hidden_size=36,
    num_query_groups=2,
    num_experts=5,
    moe_router_topk=2,
    moe_aux_loss_coeff=0.3,
    moe_z_loss_coeff=0.2,
    moe_shared_expert_intermediate_size=24,
    moe_shared_expert_gate=True,
    moe_layer_freq="ED",
)
F = dict(precision="fp64", model=M)
ONE = {}
E2 = {"precision": "fp64", "model": replace(M, num_experts=4)}
E6 = {"precision": "fp64", "model": replace(M, num_experts=4, moe_router_topk=4)}
CASES = [
    Case(**E2),
    Case(dp=2, ep=2, **E2),
    Case(dp=2, ep=2, zero=3, recompute="full", **E2),
    Case(dp=4, ep=2, zero=2, micro_batches=3, **E2),
    Case(tp=2, sp=True, ep=2, etp=1, **E2),
    Case(tp=2, dp=2, sp=True, ep=4, etp=1, zero=1, micro_batches=1, recompute="selective", **E2),
    Case(tp=2, dp=2, sp=True, ep=2, etp=2, zero=1, **E2),
    Case(tp=2, dp=2, sp=True, ep=1, etp=1, zero=3, **E2),
    Case(pp=2, cp=2, ep=2, micro_batches=3, schedule="zero-bubble", **E2),
    Case(dp=2, ep=2, **E6),
    Case(tp=2, dp=2, sp=True, ep=4, etp=1, recompute="full", zero=3, **E6),
    Case(**F),
    Case(recompute="full", **F),
    Case(tp=2, **F),
    Case(tp=2, sp=True, micro_batches=3, recompute="full", **F),
    Case(cp=2, **F),
    Case(cp=3, tp=2, sp=False, recompute="full", **F),
    Case(pp=2, dp=2, zero=1, **F),
    Case(dp=2, zero=3, recompute="selective", **F),
    Case(pp=2, schedule="zero-bubble", tp=2, zero=2, micro_batches=4, **F),
    Case(dp=3, zero=2, micro_batches=1, batch=8, micro_batch_size=3, **F),
    Case(batch=8, micro_batches=1, **F),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it(case, ranks):
    out = ranks(case.world).run(train, case)
    o = out[0]
    print(str(case), o.losses, o.norms)
    key = case.batch, case.model
    ref = ONE.setdefault(key, (o.losses, o.norms))
    for a, b in zip(ref, (o.losses, o.norms)):
        assert torch.allclose(
            torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64), rtol=1e-10, atol=0
        ), (a, b)
    config = case.config()
    for rank, o in enumerate(out):
        if case.ep > 1 and case.model.moe_router_topk < 4:
            continue
        e = estimate(config, case.layout, rank)
        for step in range(3):
            m = {
                k: (o.memory[step][k], e.memory[k])
                for k in e.memory
                if k in o.memory[step] and o.memory[step][k] != e.memory[k]
            }
            s = {k: (o.sent[step][k], e.traffic[k]) for k in e.traffic if o.sent[step][k] != e.traffic[k]}
            assert not m and not s, (rank, step, m, s)
