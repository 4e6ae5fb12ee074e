"""States in host memory (--optimizer-cpu-offload): the same run to the bit, with the predicted bytes."""

import itertools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megazero.engine.model.stage import declare
from megazero.engine.options.optimizers import ADAMW
from megazero.engine.plan.optimizer_sizes import Rates
from megazero.engine.plan.program.operations import (
    FetchGradient,
    FetchWeights,
    GradNorm,
    Op,
    Reduce,
    ReduceReplicas,
    Start,
    StoreGradient,
    SumTied,
    Sync,
    Update,
    Wait,
    name_of,
)
from megazero.engine.plan.program.program import Program, program
from megazero.engine.plan.program.rank_spec import RankSpec, rank_spec
from megazero.planner.bytes.estimate import estimate
from megazero.planner.state_shares import host_rate
from tests.helpers.chains import Curve, configured, make_corpus
from tests.helpers.chains import train as train_chain
from tests.helpers.families import of_family
from tests.helpers.rings import by_default
from tests.helpers.table import for_each
from tests.parallel.cases import MODEL, Case, train
from tests.parallel.test_parity import check_bytes
from tests.parallel.test_pretended_gpu import FOR_GRADIENTS, train_watched

SMALL = replace(MODEL, num_layers=3)
LLAMA = replace(SMALL, **of_family("llama"), num_query_groups=2)


def case_of(**changes: object) -> Case:
    return Case(**({"model": SMALL, "dp": 2, "micro_batches": 3} | changes))  # type: ignore[arg-type]


SAME = [
    case_of(dp=1, zero=2, precision="bf16", ema=2),  # alone, a rank adds up gradients in host memory too
    case_of(dp=1, zero=3, pp=2, schedule="zero-bubble", model=replace(SMALL, num_layers=4), frozen=("*.bias",)),
    case_of(dp=1, zero=2, recompute="full", md=True, options=(("overlap_comm", False),)),
    case_of(dp=1, precision="bf16"),
    case_of(zero=0),
    case_of(zero=1, precision="fp16", options=(("overlap_comm", False),)),
    case_of(zero=2, precision="bf16", grad_dtype="bf16", options=(("reduce_bucket_size", 3000),)),
    case_of(zero=3, md=True, recompute="full", host=True),
    case_of(zero=2, micro_batches=1, optimizer="lion", precision="fp64"),
    case_of(dp=4, zero=2, options=(("zero_shard_size", 2),), ema=1),  # sums over replicas precede the last copy
    case_of(dp=1, pp=2, schedule="zero-bubble", model=replace(SMALL, num_layers=4)),  # a tied table on two stages
]
# On four ranks. The parity tests have their pairs of options, against plain PyTorch.
LARGE = [
    case_of(pp=2, zero=2, tp=1, model=replace(SMALL, num_layers=4)),
    case_of(tp=2, sp=True, zero=3, model=LLAMA, micro_batches=3, frozen=("blocks.0.*",)),
]


@pytest.mark.parametrize(
    "shares",
    [
        pytest.param((1.0, 1.0), id="whole"),
        pytest.param((0.5, 0.7), id="parts", marks=pytest.mark.slow),  # the matrices have a share of 0.4
    ],
)
@pytest.mark.parametrize(
    "case", [*by_default(SAME, 0, 8), *(pytest.param(case, marks=pytest.mark.slow) for case in LARGE)], ids=str
)
def test_it_is_the_same_run_to_the_bit(case: Case, shares: tuple[float, float], ranks) -> None:
    """shares: of the states in host memory, in one run, and in a file, in another."""
    device = ranks(case.world).run(train, case)
    for fraction, disk in zip(shares, (False, True), strict=True):
        offloaded = case._replace(offload=fraction, disk=disk)
        host = ranks(case.world).run(train, offloaded)
        for ours, theirs in zip(host, device, strict=True):
            assert ours.losses == theirs.losses and ours.norms == theirs.norms
            assert ours.averaged == theirs.averaged and bool(ours.averaged) is bool(case.ema)
            for here, there in zip(ours.memory, theirs.memory, strict=True):
                assert here["optimizer"] < there["optimizer"] or not there["optimizer"]
                assert here["host"] > there["host"]
                assert here["gradients"] < there["gradients"]
                if fraction == 1:
                    assert here["optimizer"] == here["gradients"] == 0
            for here, there in zip(ours.sent, theirs.sent, strict=True):
                assert here | {"pcie": 0, "nvme": 0} == there | {"pcie": 0} and here["pcie"] > there["pcie"]
                assert (here["nvme"] > 0) is disk
        check_bytes(offloaded, host)


ON_GPU = [
    case_of(zero=2, precision="fp16", offload=0.8, options=(("reduce_bucket_size", 3000),)),
    case_of(zero=2, precision="fp16", offload=1.0, disk=True),
    case_of(dp=1, pp=2, micro_batches=2, offload=1.0),
]


@pytest.mark.second
@pytest.mark.parametrize("case", ON_GPU, ids=str)
def test_copies_of_a_gpu_are_in_order(case: Case, ranks) -> None:
    """Gradients, weights and pinned memory have one user at a time; the host waits for gradients and their norm."""
    case = case._replace(device="pretended gpu", kernels="eager")
    for rank, (outcome, found, waits) in enumerate(ranks(case.world).run(train_watched, case)):
        assert found == {}
        of_files = ["Event.synchronize"] * case.disk  # in the thread of the file
        waits = [[wait for wait in step if wait not in of_files] for step in waits]
        assert waits == [[*FOR_GRADIENTS[case.disk :], "tolist"]] * len(waits)
        memory, traffic = estimate(case.config(), case.layout, rank, needs_staging_buffer=False)
        assert outcome.sent == [traffic] * len(waits) and traffic["pcie"] > 0
        for measured in outcome.memory:
            assert measured | {"peak": 0} == memory | {"peak": 0}


def test_host_memory_has_masters_states_and_a_buffer() -> None:
    """In bf16, 4 + 4 + 4 bytes of states, and a buffer for fp32 gradients; in fp32, masters are a copy too."""
    for precision, grad_dtype, host in (("bf16", "fp32", 16), ("bf16", "bf16", 14), ("fp32", "fp32", 16)):
        case = case_of(precision=precision, grad_dtype=grad_dtype, zero=1, offload=1.0)
        config = case.config()
        assert host_rate(Rates.of(config, ADAMW)) == host
        held = estimate(config, case.layout).memory
        spec, _ = planned(case)
        least = host * sum(unit.numel for unit in spec.units.values()) // 2
        assert held["optimizer"] == 0 and least <= held["host"]
        # an update casts narrower gradients of one unit
        most = 4 * max(unit.numel for unit in spec.units.values()) // 2
        assert held["host"] == least + (most if grad_dtype == "bf16" else 0)


def test_a_rank_alone_adds_up_gradients_in_host_memory() -> None:
    """Under stages 2 and 3 the sum returns to the buffer one unit ahead; under 0 and 1, it stays on the device."""
    _, step = planned(case_of(dp=1, zero=2, offload=1.0))
    names = [name_of(op) for op in step.gradients if "mb" not in name_of(op)]
    assert names.count("Open blocks.1") == 1 and names.count("start StoreGradient blocks.1") == 3
    at = names.index("start FetchGradient blocks.1")
    assert names.index("wait FetchGradient blocks.2") < at < names.index("start Reduce blocks.2", at)
    _, step = planned(case_of(dp=1, zero=1, offload=1.0))
    assert not [op for op in step.gradients if isinstance(op, Start) and isinstance(op.op, FetchGradient)]
    deep = replace(SMALL, num_layers=9)
    peaks = [estimate(*case_of(dp=1, zero=z, offload=1.0, model=deep).resolved()).memory["peak"] for z in (1, 2)]
    assert peaks[1] < 0.8 * peaks[0]


ON_HOST = {"optimizer_cpu_offload": True}
PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "host": ON_HOST,
    "both": ON_HOST | {"optimizer_offload_fraction": 0.6},
    "file": ON_HOST | {"optimizer_nvme_offload": tempfile.gettempdir()},
}


@pytest.mark.second
def test_a_run_resumes_in_another_place(ranks, tmp_path: Path) -> None:
    """The bits are the same. Saves in the background overlap with updates of the states that they write."""
    corpus = make_corpus(tmp_path)

    def run(iterations: int, place: str, **options: Any) -> Curve:
        if place == "file":  # whose states a save in the background would copy
            options.pop("async_save", None)
        config = configured("dp2 zero1", corpus, iterations, "bf16", **options)
        config = replace(config, optimizer=replace(config.optimizer, **PLACES[place]))
        one, other = ranks(2).run(train_chain, 2, config, 1)
        assert one == other
        return one

    whole = run(4, "device", save=str(tmp_path / "whole"))
    for first in ("device", "host", "file"):
        begun = str(tmp_path / first)
        assert run(2, first, save=begun, async_save=True) == whole[:2], first
        for second in PLACES:
            rest = run(4, second, save=str(tmp_path / f"{first} {second}"), load=begun, async_save=True)
            assert rest == whole[2:], (first, second)


def planned(case: Case, pp: int = 0) -> tuple[RankSpec, Program]:
    spec = rank_spec(case.config(), case.layout, pp, declare)
    return spec, program(spec, "1f1b", case.micro_batches)


def of_unit(ops: list[Op], unit: str, kinds: tuple[type, ...]) -> list[str]:
    found = [op for op in ops if isinstance(op.op if isinstance(op, (Start, Wait)) else op, kinds)]
    return [name_of(op).replace(f" {unit}", "") for op in found if unit in name_of(op)]


def test_gradients_are_copied_behind_the_backward() -> None:
    spec, step = planned(case_of(zero=2, offload=1.0, micro_batches=2))
    seen = of_unit(step.gradients, "blocks.1", (Reduce, StoreGradient, FetchGradient))
    assert seen == [
        *("start Reduce", "wait Reduce", "start StoreGradient", "wait StoreGradient"),
        *("start FetchGradient", "wait FetchGradient", "start Reduce", "wait Reduce"),
        *("start StoreGradient", "wait StoreGradient"),
    ]
    names = [name_of(op) for op in step.gradients]
    # the copy of a layer's gradient is in flight while the next layer's backward computes
    backward = names.index("Backward blocks.0 mb 0")
    assert names.index("start StoreGradient blocks.2") < backward < names.index("wait StoreGradient blocks.2")
    assert isinstance(step.gradients[-1], GradNorm)
    started = [op.op for op in step.gradients if isinstance(op, Start)]
    assert len(started) == len([op for op in step.gradients if isinstance(op, Wait) and op.op in started])
    assert spec.offloaded_units == spec.trained_units


@for_each("fraction", [1.0, 0.4])
@for_each(("dp", "zero"), [(1, 2), (2, 0), (2, 3)])
@for_each(("pp", "layers", "schedule"), [(1, 1, "1f1b"), (1, 3, "1f1b"), (2, 2, "zero-bubble")])
def test_a_gradient_is_used_by_one_operation_at_a_time(
    fraction: float, dp: int, zero: int, pp: int, layers: int, schedule: str
) -> None:
    """Also on a rank of so few units that the next one is that of the last micro-batch; and each ends in one place."""
    for overlap, micro_batches in itertools.product((False, True), (1, 3)):
        case = case_of(
            dp=dp, zero=zero, pp=pp, schedule=schedule, micro_batches=micro_batches, offload=fraction,
            model=replace(SMALL, num_layers=layers), options=(("overlap_comm", overlap),),
        )  # fmt: skip
        for rank in range(pp):
            spec = rank_spec(case.config(), case.layout, rank, declare)
            flying, stored = dict[str, Op](), set[str]()
            for op in program(spec, schedule, micro_batches).gradients:
                about = op.op if isinstance(op, (Start, Wait)) else op
                if not isinstance(about, (Reduce, ReduceReplicas, StoreGradient, FetchGradient)):
                    continue
                if about.unit not in spec.offloaded_units:
                    continue
                unit, words = about.unit, f"{name_of(op)} on rank {rank} of {case}"
                if isinstance(op, Wait):
                    assert flying.pop(unit) == about, words
                    continue
                assert unit not in flying, words
                if isinstance(op, Start):
                    flying[unit] = about
                if isinstance(about, FetchGradient):
                    assert unit in stored, words
                    stored.remove(unit)
                elif isinstance(about, StoreGradient):
                    stored.add(unit)
            left = {unit for unit in spec.offloaded_units if unit != spec.tied}
            assert not flying and left <= stored, (rank, case)


def test_weights_are_copied_behind_the_next_update() -> None:
    spec, step = planned(case_of(zero=1, offload=1.0))
    names = [name_of(op) for op in step.update]
    first, second, *_ = spec.trained_units
    assert names[:5] == [
        f"Update {first}",
        f"start FetchWeights {first}",
        f"Update {second}",
        f"wait FetchWeights {first}",
        f"start Sync {first}",
    ]
    assert names[-1] == f"start Sync {spec.trained_units[-1]}"
    kinds = [type(op.op if isinstance(op, (Start, Wait)) else op) for op in step.update]
    number = len(spec.trained_units)
    assert [kinds.count(kind) for kind in (Update, FetchWeights, Sync)] == [number, 2 * number, number]


def test_the_first_units_are_in_host_memory_and_update_last() -> None:
    spec, step = planned(case_of(zero=3, offload=0.5))
    on_host = [name for name, unit in spec.units.items() if unit.on_host]
    assert on_host == list(spec.units)[: len(on_host)] and 0 < len(on_host) < len(spec.units)
    total = sum(unit.numel for unit in spec.units.values())
    within = sum(spec.units[name].numel for name in on_host)
    assert within <= 0.5 * total < within + spec.units[list(spec.units)[len(on_host)]].numel
    updates = [op.unit for op in step.update if isinstance(op, Update)]
    assert updates[-len(on_host) :] == on_host and sorted(updates) == sorted(spec.units)


def test_both_stages_update_a_tied_table_in_the_same_place() -> None:
    """CPUs and GPUs round differently: a table on both would become two tables."""
    for fraction, expected in ((0.5, False), (0.99, False), (1.0, True)):
        for pp in (0, 1):
            spec, step = planned(case_of(dp=1, pp=2, offload=fraction), pp)
            assert spec.tied and spec.units[spec.tied].on_host is expected
            names = [name_of(op) for op in step.gradients if isinstance(op, (SumTied, StoreGradient))]
            assert names == [f"SumTied {spec.tied}", *([f"StoreGradient {spec.tied}"] if expected else [])]


@pytest.mark.parametrize(
    ("dp", "zero", "reductions"), [(1, 0, 1), (1, 2, 3), (2, 0, 1), (2, 1, 1), (2, 2, 3), (2, 3, 3)]
)
def test_bytes_of_copies_by_the_formula_of_the_docs(dp: int, zero: int, reductions: int) -> None:
    """A step of three micro-batches: gradients down, up again for each further reduction; 16-bit weights up."""
    case = case_of(dp=dp, zero=zero, precision="bf16", offload=1.0)
    spec, _ = planned(case)
    owned = sum(unit.numel for unit in spec.units.values()) // (dp if zero else 1)
    assert estimate(*case.resolved()).traffic["pcie"] == (4 * (2 * reductions - 1) + 2) * owned
    in_file = estimate(*case._replace(disk=True).resolved())
    assert in_file.traffic["pcie"] == (4 * (2 * reductions - 1) + 2) * owned
    pages = 4096 * (2 * reductions + 2) * len(spec.units)  # each read and write is of whole pages
    moved = in_file.traffic["nvme"] - (32 + 8 * (reductions - 1)) * owned
    assert 0 <= moved < pages
    largest = 16 * max(unit.numel for unit in spec.units.values()) // (dp if zero else 1)
    assert 16 * owned <= in_file.memory["nvme"] and 2 * largest <= in_file.memory["host"] < 2 * (largest + 2 * 4096)
