"""The engine on the pretended GPU: every layout's paths on CUDA have no fault of order, and each planted one is found.

Losses are the reference's there too, bytes those of the estimate, and the host waits once a step.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from megazero.engine.mesh.mesh import Mesh
from megazero.engine.model.stage import declare
from megazero.engine.plan.program.rank_spec import rank_spec
from megazero.planner.bytes.estimate import estimate
from megazero.planner.layouts import rank_layers
from tests.helpers.families import of_family
from tests.helpers.planted import Fault, planted
from tests.helpers.ranks import RankError
from tests.helpers.rings import SECOND, by_default
from tests.parallel import matrix
from tests.parallel.cases import MODEL, Case, Outcome, train_on
from tests.parallel.test_parity import check_bytes, check_layers, check_near, parameters
from tests.pretended_gpu import EARLY_FREE, GPU, MIXED_DEVICES, RACE, Finding, pretended_gpu

FOR_GRADIENTS = ["Stream.synchronize", "copy_ of pageable memory [GradNorm]"]  # in host memory, and their norm
FOR_STATISTICS = ["copy_ of pageable memory"]  # sums of units in host memory
STEPS = 2  # the second finds buffers, streams and moments of the first


class Watched(NamedTuple):
    """One rank's results. `waits`: per step, the operators that the host waited for."""

    outcome: Outcome
    found: Counter[Finding]
    waits: list[list[str]]


def train_watched(rank: int, case: Case, fault: Fault | None = None, capability: tuple[int, int] = (9, 0)) -> Watched:
    waits: list[list[str]] = []

    @contextmanager
    def around_step() -> Iterator[None]:
        before = len(findings.waits)
        yield
        waits.append(findings.waits[before:])

    with pretended_gpu(capability) as findings, nullcontext() if fault is None else planted(fault):
        outcome = train_on(Mesh.build(case.layout, rank, GPU), case, STEPS, around_step=around_step)
    return Watched(outcome, findings.found, waits)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Generate cases when pytest collects tests, and not when a rank imports this module."""
    if metafunc.function is test_every_path_of_a_gpu_is_in_order:
        metafunc.parametrize("case", parameters(matrix.on_gpu()))


def test_every_path_of_a_gpu_is_in_order(case: Case, ranks) -> None:
    watched = ranks(case.world).run(train_watched, case)
    outcomes = [outcome for outcome, _, _ in watched]
    for rank, (_, found, waits) in enumerate(watched):
        assert found == {}
        spec = rank_spec(case.config(), case.layout, case.layout.coord(rank).pp, declare)
        wanted = [*(FOR_GRADIENTS[case.disk :] if spec.offloaded_units else []), "tolist"]
        if case.stats:
            wanted += [*(FOR_STATISTICS if spec.offloaded_units else []), "tolist"]
        for step in waits:
            of_experts = [wait for wait in step if "[Forward blocks." in wait or "[Forward head" in wait]
            assert len(of_experts) == waits_for_experts(case, rank)
            other = [*of_experts, *(["Event.synchronize"] * case.disk)]  # the latter in the thread of a file
            assert [wait for wait in step if wait not in other] == wanted
    check_bytes(case, outcomes)
    check_near(case, outcomes)
    if case.precision == "fp64":
        check_layers(case, outcomes)


def waits_for_experts(case: Case, rank: int) -> int:
    """Return the waits in a step for numbers of rows: one per layer, unless all rows stay and one kernel reads them."""
    model, layout = case.model, case.layout
    fused = case.precision == "bf16" and model.hidden_size % 8 == 0 == model.expert_size // layout.etp % 8
    pp = layout.coord(rank).pp
    layers = set(rank_layers(layout, model.num_layers, pp))
    if layout.placement[-1] == pp:  # the head's stage, with the modules of multi-token prediction
        layers |= set(range(model.num_layers, model.num_layers + model.mtp_num_layers))
    waits = len(layers & set(model.expert_layers)) if layout.ep > 1 or not fused else 0
    return waits * case.micro_batches


# Widths of multiples of 8, which torch's grouped kernel needs; all experts of a token, as many rows as a plan assumes.
EXPERTS = replace(
    MODEL,
    num_layers=3,
    hidden_size=64,
    num_attention_heads=8,
    seq_length=12,
    **of_family("mixtral"),
    num_experts=4,
    moe_router_topk=4,
    moe_ffn_hidden_size=48,
    moe_layer_freq="2",
    moe_aux_loss_coeff=0.1,
    moe_shared_expert_intermediate_size=16,
)

HALF = replace(EXPERTS, moe_expert_capacity_factor=0.5)


@pytest.mark.parametrize(
    ("case", "waits"),
    [
        pytest.param(
            Case(model=EXPERTS, precision="bf16", recompute="full"), 0, marks=SECOND
        ),  # the grouped kernel reads sizes on the GPU
        pytest.param(Case(model=HALF, precision="bf16", recompute="full"), 1, marks=SECOND),  # the number of rows
        pytest.param(Case(model=HALF, precision="bf16", dp=2, ep=2), 1, marks=SECOND),
        (Case(model=EXPERTS, precision="bf16", dp=2, ep=2, zero=3), 1),  # an exchange needs them on the host
        pytest.param(
            Case(model=EXPERTS, precision="bf16", tp=2, sp=True, ep=2, etp=1, recompute="full"),
            1,  # in the Forward; its Recompute repeats the exchange
            marks=pytest.mark.slow,
        ),
        pytest.param(Case(model=EXPERTS, dp=2, zero=2), 1, marks=pytest.mark.slow),  # fp32: a product per expert
    ],
    ids=str,
)
def test_the_host_waits_for_experts_at_most_once_per_layer(case: Case, waits: int, ranks) -> None:
    case = case._replace(device="pretended gpu", kernels="eager")
    layers_of_micro_batches = 2 * case.micro_batches
    for rank, (outcome, found, seen) in enumerate(ranks(case.world).run(train_watched, case)):
        assert found == {}
        in_layers = [[wait for wait in step if "Forward blocks." in wait] for step in seen]
        assert [len(step) for step in in_layers] == [waits * layers_of_micro_batches] * STEPS
        assert [len(step) for step in seen] == [waits * layers_of_micro_batches + 1] * STEPS
        memory, traffic = estimate(case.config(), case.layout, rank, needs_staging_buffer=False)
        assert outcome.sent == [traffic] * STEPS
        for measured in outcome.memory:
            assert measured | {"peak": 0} == memory | {"peak": 0}


@pytest.mark.second
@pytest.mark.parametrize(
    ("architecture", "reset", "options"),
    [
        ("gpt2", "documents", {}),
        ("llama", "documents", {"window_size": 3, "layer_pattern": "GL"}),
        ("llama", "", {"window_size": 4, "num_query_groups": 2, "attention_scale": 0.2}),
    ],
)
def test_documents_and_windows_on_a_gpu_without_flash_attention(
    architecture: str, reset: str, options: dict[str, Any], ranks
) -> None:
    model = replace(MODEL, num_layers=2, **of_family(architecture), **options)
    case = Case(model=model, kernels="eager", precision="fp16", reset=reset)
    (watched,) = ranks(1).run(train_watched, case, None, (7, 0))
    assert watched.found == {}
    assert watched.waits == [["tolist"]] * STEPS
    check_near(case, [watched.outcome])


SMALL = replace(MODEL, num_layers=3)
OFFLOADED = Case(model=SMALL, kernels="eager", recompute="full", host=True, micro_batches=3)
ROTARY = Case(model=replace(SMALL, **of_family("llama")), kernels="eager")
SHARDED = Case(dp=2, zero=3, model=SMALL, kernels="eager")
STAGES = Case(pp=2, model=SMALL, kernels="eager", micro_batches=3)
STORE = "megazero.engine.memory.copies", "StreamCopies", "start_store"
LINK = "megazero.engine.memory.copies", "HostLink", "_start"
FETCH = "megazero.engine.memory.copies", "StreamCopies", "start_fetch"
START = "megazero.engine.mesh.collectives", "Axis", "_start"


@pytest.mark.parametrize(
    "case, fault, kinds, words",
    [
        pytest.param(
            OFFLOADED,
            Fault("megazero.engine.memory.copies", "DeviceCopy", "wait", "self.done is not None", "False"),
            {RACE},
            "native_layer_norm [Recompute blocks.2 mb 0] on the compute stream reads bytes of a tensor in device "
            "memory that copy_ [start Fetch blocks.2 mb 0] on stream 2 writes",
            id="a fetch is not waited for",
        ),
        pytest.param(
            OFFLOADED,
            Fault(*LINK, "stream.wait_stream(self.streams.compute)", "pass"),
            {RACE},
            "copy_ [Keep blocks.1 mb 0 slot 1] on stream 1 reads bytes of a tensor in device memory that copy_ [Keep "
            "blocks.1 mb 0 slot 1] on the compute stream writes",
            id="a copy to the host does not wait for the computation",
            marks=SECOND,
        ),
        pytest.param(
            OFFLOADED,
            Fault(*STORE, "left is not None", "False"),
            {RACE},
            "copy_ [Keep blocks.2 mb 0 slot 2] on the compute stream writes bytes of a tensor in device memory that "
            "copy_ [Keep blocks.0 mb 0 slot 0] on stream 1 reads",
            id="a buffer is written while it is copied to the host",
            marks=SECOND,
        ),
        pytest.param(
            OFFLOADED,
            Fault(*FETCH, "copy.done is not None", "False"),
            {RACE},
            "copy_ [start Fetch blocks.2 mb 0] on stream 2 reads bytes of a tensor in pinned memory that copy_ [Keep "
            "blocks.2 mb 0 slot 2] on stream 1 writes",
            id="a fetch does not wait for the copy to the host",
            marks=SECOND,
        ),
        pytest.param(
            OFFLOADED,
            Fault(*LINK, "stream.wait_stream(self.streams.compute)", "pass"),
            {RACE},
            "copy_ [start Fetch blocks.0 mb 0] on stream 2 writes bytes of a tensor in device memory that "
            "native_layer_norm_backward [Backward blocks.2 mb 0] on the compute stream reads",
            id="a fetch overwrites a buffer that backward reads",
            marks=SECOND,
        ),
        pytest.param(
            OFFLOADED,
            Fault(*STORE, "buffer[: part.numel()].copy_(part)", "buffer = part.clone()"),
            {EARLY_FREE},
            "copy_ [Keep blocks.0 mb 0 slot 0] on stream 1 reads a tensor of 8448 bytes that is freed",
            id="a block's input is freed while it is copied to the host",
            marks=SECOND,
        ),
        pytest.param(
            ROTARY,
            Fault("megazero.engine.kernels.rotary", "Rotary", "tables", "angles.sin()", "angles.sin().cpu()"),
            {MIXED_DEVICES},
            "addcmul_ [Forward blocks.0 mb 0] on the compute stream has a tensor [11, 1, 4] in host memory",
            id="a table is on the host",
        ),
        pytest.param(
            SHARDED,
            Fault(*START, "work.wait()", "work.finish() if self.name == 'shard' else work.wait()"),
            {RACE, EARLY_FREE},
            "communicator shard writes",
            id="collectives along shard are not waited for",
        ),
        pytest.param(
            STAGES,
            Fault(*START, "work.wait()", "work.finish() if self.name == 'pp' and peer is not None else work.wait()"),
            {RACE, EARLY_FREE},
            "lane 0 writes; nothing orders them",
            id="messages between stages are not waited for",
            marks=SECOND,
        ),
    ],
)
def test_a_planted_fault_is_found(case: Case, fault: Fault, kinds: set[str], words: str, ranks) -> None:
    """Findings have the kind, and name operators, operations and streams. No loss shows the fault."""
    watched = ranks(case.world).run(train_watched, case, fault)
    for _, found, _ in watched:
        assert {finding.kind for finding in found} == kinds
        assert any(words in finding.text for finding in found), found
    check_near(case, [outcome for outcome, _, _ in watched])


def test_an_early_read_is_found(ranks) -> None:
    fault = Fault(
        "megazero.engine.step.interpreter",
        "Interpreter",
        "_norm",
        "self.zero",
        "float(self.seed_gradient) and self.zero",
    )
    (watched,) = ranks(1).run(train_watched, ROTARY, fault)
    assert watched.waits == [["__float__ [GradNorm]", "tolist"]] * STEPS


@pytest.mark.second
@pytest.mark.parametrize(
    "case, fault, words",
    [
        (
            Case(dp=2, zero=2, model=SMALL, kernels="eager", options=(("reduce_bucket_size", 1000),)),
            Fault(
                "megazero.engine.zero.reduce_scatter",
                "Reducer",
                "start",
                "range(count)",
                "range(count)[:: 1 - 2 * self.axis.rank]",
            ),
            ["is reduce-scatter of ", " on rank 0", " on rank 1"],
        ),
        (
            STAGES,
            Fault(
                "megazero.engine.step.interpreter",
                "Interpreter",
                "_tag",
                "op.micro_batch",
                "(op.micro_batch ^ self.pp.rank)",
            ),
            ["a message 0 -> 1 of 2112 x torch.float32, tag 6 on rank 0", "tag 8 on rank 1"],
        ),
    ],
    ids=["buckets in another order", "messages in another order"],
)
def test_members_of_a_communicator_that_differ_are_found(case: Case, fault: Fault, words: list[str], ranks) -> None:
    """One rank raises before it issues the operation, which would hang."""
    with pytest.raises(RankError) as caught:
        ranks(case.world).run(train_watched, case, fault)
    assert "UnmatchedOrder: operation" in str(caught.value)
    assert all(word in str(caught.value) for word in words), caught.value


WIDE = replace(SMALL, hidden_size=96, kv_channels=32)  # rows of most matrices are whole blocks


@pytest.mark.second
@pytest.mark.parametrize(
    "case",
    by_default(
        [
            Case(model=WIDE, precision="bf16", dp=2, zero=2, moments="int8", masters="split"),
            Case(model=WIDE, precision="bf16", dp=2, tp=1, zero=3, moments="bf16", masters="split", grad_dtype="bf16"),
            Case(model=WIDE, moments="int8", optimizer="muon"),
        ],
        0,
    ),
    ids=str,
)
def test_small_states_are_made_wide_in_order(case: Case, ranks) -> None:
    """The table of places is copied once, when the engine is made: the host waits for no update."""
    case = case._replace(device="pretended gpu", kernels="eager")
    for rank, (outcome, found, waits) in enumerate(ranks(case.world).run(train_watched, case)):
        assert found == {}
        assert waits == [["tolist"]] * STEPS
        memory, traffic = estimate(case.config(), case.layout, rank, needs_staging_buffer=False)
        assert outcome.sent == [traffic] * STEPS
        for measured in outcome.memory:
            assert measured | {"peak": 0} == memory | {"peak": 0}
