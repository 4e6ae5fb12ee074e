"""`--plan-search`: it lists every layout, leaves out none that fits, and orders layouts whose order is known."""

import itertools
import random
from dataclasses import replace

import pytest

from megazero.engine.model.stage import declare
from megazero.flags.cli import parse
from megazero.flags.flag_names import with_values
from megazero.flags.resolve import resolve
from megazero.planner.bytes.capacity import estimated, least
from megazero.planner.bytes.estimate import stage_bytes
from megazero.planner.run_plan import plan_config, telling_stages
from megazero.planner.search.candidates import Candidate, candidates
from megazero.planner.search.search import ClosedTerms
from megazero.planner.time.devices import Constant, Device, load_device
from megazero.planner.time.step_time import StepPrograms, step_parts
from tests.helpers.table import for_each
from tests.parallel.matrix import case_of, covers, numbers, with_experts

H100 = load_device("h100-80gb")
LONG = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 8192 --vocab-size 128 --precision bf16"
SHORT = LONG.replace("8192", "128")
EXPERTS = "--architecture llama --num-experts 2"


@pytest.mark.parametrize(("more", "divisions"), [("", [(1, 0)]), (EXPERTS, [(1, 0), (2, 0), (1, 1), (2, 1)])])
def test_a_search_lists_every_layout(more: str, divisions: list[tuple[int, int]]) -> None:
    """Four ranks of a node: each combination of sizes and policies that a run accepts, written as a plain product.

    Left out are equal ones (every ZeRO stage of one rank; one stage of each schedule), and gpipe, which holds most.
    """
    config = parse(f"{LONG} {more} --plan-search --world-size 4 --device-type h100-80gb --global-batch-size 4".split())
    found = set(candidates(config, 4, H100))
    schedules = [("1f1b", 1), ("zero-bubble", 1), ("zero-bubble-v", 2), ("interleaved", 2)]
    keeps = [("none", False), ("selective", False), ("full", False), ("full", True)]
    wanted = set()
    for tp, cp, pp in itertools.product((1, 2, 4), (1, 2), (1, 2, 4)):
        if tp * cp * pp > 4:
            continue
        stages = (0, 1, 2, 3) if 4 > tp * pp else (config.zero.zero_stage,)
        policies = itertools.product(schedules if pp > 1 else schedules[:1], stages, keeps, (False, True), (1, 2, 4))
        for ((schedule, chunks), stage, keep, sp, micro), (ep, etp) in itertools.product(policies, divisions):
            if 4 // (tp * cp * pp) * micro > 4 or etp >= tp or (tp > 1 and ep > 1 and not etp):
                continue  # replicas without samples; experts as whole as they are anyhow, or cut over tp ranks
            c = Candidate(tp, cp, pp, schedule, chunks, stage, 0, *keep, sp, micro, ep, etp)
            try:
                resolve(c.apply(config), 4, 0, declare)
            except ValueError:
                continue
            wanted.add(c)
    assert len(wanted) > 300 and {c.cp for c in wanted} == {1, 2}
    assert not wanted - found, sorted(wanted - found)[:3]


@pytest.mark.second
@for_each("recompute", ["none", "full"])
@for_each("model", ["--architecture llama --num-experts 8 --moe-layer-freq DDEEEEEEEEEE", "--architecture llama"])
@for_each("schedule", ["gpipe", "1f1b", "zero-bubble", "interleaved", "zero-bubble-v"])
def test_the_fullest_stage_is_among_those_that_a_search_looks_at(schedule: str, model: str, recompute: str) -> None:
    """Dense layers come first: the experts' weights, and so the most bytes, are in the middle of the pipeline."""
    chunks = 2 if schedule in ("interleaved", "zero-bubble-v") else 1
    line = (
        f"--num-layers 12 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --vocab-size 300 --precision bf16 "
        f"{model} --pipeline-model-parallel-size 6 --virtual-pipeline-stages {chunks} --pipeline-schedule {schedule} "
        f"--recompute {recompute} --global-batch-size 24 --world-size 12 --device-type h100-80gb --plan"
    )
    config, layout, device = plan_config(parse(line.split()))
    peaks = [stage_bytes(config, layout, pp, device.kind).peak for pp in range(layout.pp)]
    assert max(peaks[pp] for pp in telling_stages(config, layout)) == max(peaks)


def test_a_given_shard_size_divides_the_ranks_that_share_weights() -> None:
    """Other sizes of the axes are left out, and so are stages that shard nothing."""
    config = parse(f"{LONG} --global-batch-size 12".split())
    for shard in (2, 3, 6):
        found = list(candidates(config, 6, H100, {"zero-shard-size": shard}))
        data = {6 // (c.tp * c.pp) for c in found}
        assert data == {n for n in (3, 6, 2) if n % shard == 0}, (shard, data)
        assert all(c.shard == shard and c.zero_stage for c in found)
    assert not list(candidates(config, 6, H100, {"zero-shard-size": 4}))


OPTIONS = (
    "",
    "--optimizer muon",
    "--optimizer muon --adam-moments int8 --hidden-size 96 --kv-channels 32",
    "--optimizer lion --grad-dtype bf16",
    "--adam-moments bf16 --master-weights split",
    "--optimizer-cpu-offload --optimizer-offload-fraction 0.4",
    "--optimizer-cpu-offload",
    "--checkpoint-in-cpu",
    "--precision fp32 --no-overlap-comm",
    EXPERTS,
    f"{EXPERTS} --optimizer muon",
)


@pytest.mark.second
def test_a_search_leaves_out_no_layout_that_fits() -> None:
    """Its bound is at most the estimate, with each optimizer, precision and place of states: a few layouts of each."""
    draw = random.Random(1)
    for more in OPTIONS:
        config = parse(f"{SHORT} --num-layers 6 {more} --global-batch-size 8".split())
        terms = ClosedTerms(config, 4, H100)
        for c in draw.sample(list(candidates(config, 4, H100)), 4):
            try:
                changed, layout = resolve(c.apply(config), 4, 0, declare)
            except ValueError:  # some options exclude some layouts
                continue
            peak = max(stage_bytes(changed, layout, stage, "cuda").peak for stage in range(layout.pp))
            assert terms.memory(c) <= peak, (more, c)
            exact = H100.constants["memory.capacity"]._replace(value=peak + H100.reserved_bytes(layout) + 1.0)
            just = replace(H100, constants=H100.constants | {"memory.capacity": exact})
            assert ClosedTerms(config, 4, just).fits(c), (more, c)


@pytest.mark.second
@pytest.mark.long
def test_no_run_that_fits_is_refused() -> None:
    """The bound that refuses a run is at most the estimate, in each case of the parity tests."""
    found = [*covers().default, *with_experts().default, *numbers().default]
    for case in map(case_of, found):
        config, layout = case.config(), case.layout
        for stage in range(layout.pp):
            bound, whole = least(config, layout, stage), estimated(config, layout, stage, "cpu")
            assert bound.total <= whole.total and bound.host <= whole.host, case


def slow_network() -> Device:
    """An H100 whose links take nearly all of the time of a step, without latency."""
    slow = dict.fromkeys(("node.bandwidth", "cluster.bandwidth"), 1e6) | dict.fromkeys(
        ("node.latency", "cluster.latency", "overhead.overlap"), 0.0
    )
    return replace(H100, constants=H100.constants | {name: Constant(n, n, n, "") for name, n in slow.items()})


@pytest.mark.parametrize(
    ("device", "world", "faster", "slower", "ratio"),
    [
        # gradients of 4 bytes are reduced, weights of 2 gathered; an all-reduce is two passes of 4
        (slow_network(), 4, {"zero_stage": 1}, {"zero_stage": 0}, 6 / 8),
        # stage 2 reduces the gradients of both micro-batches
        (slow_network(), 4, {"zero_stage": 1}, {"zero_stage": 2}, 6 / 10),
        # stage 3 also gathers weights twice for each
        (slow_network(), 4, {"zero_stage": 1}, {"zero_stage": 3}, 6 / 16),
        # of two copies, halves are gathered and reduced, and the reduced half all-reduced
        (slow_network(), 4, {"zero_stage": 1}, {"zero_stage": 1, "shard": 2}, 4.5 / 5),
        # four micro-batches and a bubble of three passes, or of half as many with two virtual stages
        (H100, 4, {"pp": 4, "schedule": "interleaved", "chunks": 2}, {"pp": 4}, 5.5 / 7),
    ],
    ids=["ZeRO 1, 0", "ZeRO 1, 2", "ZeRO 1, 3", "two copies", "virtual stages"],
)
def test_layouts_whose_order_is_known(
    device: Device, world: int, faster: dict[str, object], slower: dict[str, object], ratio: float
) -> None:
    """The formulas, by which a search ranks, and the simulation, by which it compares, have the ratio found by hand."""
    plain = Candidate(1, 1, 1, "1f1b", 1, 0, 0, "none", False, False, 1)
    flags = "--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --vocab-size 64"
    if device is not H100:
        flags = SHORT
    config = parse(f"{flags} --precision bf16 --grad-dtype fp32 --global-batch-size 8".split())
    if "pp" in slower:
        config = with_values(config, {"global-batch-size": 4})
    terms, both = ClosedTerms(config, world, device), (plain._replace(**faster), plain._replace(**slower))
    ranked = [terms.seconds(c) for c in both]
    simulated = [step_parts(StepPrograms(*resolve(c.apply(config), world, 0, declare)), device).seconds for c in both]
    assert ranked[0] / ranked[1] == pytest.approx(ratio, rel=0.08)
    assert simulated[0] / simulated[1] == pytest.approx(ratio, rel=0.08)
