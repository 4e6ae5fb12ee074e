import pytest
from tests.parallel.test_pretended_gpu import *
from tests.parallel.test_offload import case_of
CASES = [
    case_of(dp=1, precision="bf16", offload=1.0),
    case_of(zero=2, precision="fp16", offload=0.6, options=(("reduce_bucket_size", 3000),)),
    case_of(zero=3, offload=1.0, md=True, recompute="full", host=True),
    case_of(dp=1, pp=2, schedule="zero-bubble", offload=1.0),
    case_of(zero=1, offload=1.0, precision="fp64", options=(("overlap_comm", False),)),
]
@pytest.mark.parametrize("case", CASES, ids=str)
def test_try(case, ranks):
    case = case._replace(device="pretended gpu", kernels="eager")
    for rank, (outcome, found, waits) in enumerate(ranks(case.world).run(train_watched, case)):
        print(waits)
        assert found == {}
        memory, traffic = estimate(case.config(), case.layout, rank, needs_staging_buffer=False)
        assert outcome.sent == [traffic] * STEPS
        for measured in outcome.memory:
            assert measured | {"peak": 0} == memory | {"peak": 0}
