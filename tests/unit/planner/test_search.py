"""`--plan-search`: it lists every layout, leaves out none that fits, and orders layouts whose order is known."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.topology import Layout
from megazero.flags.cli import parse
from megazero.flags.config import Config
from megazero.flags.flag_names import with_values
from megazero.flags.resolve import make_layout, resolve
from megazero.planner.bytes.capacity import estimated, least
from megazero.planner.bytes.estimate import stage_bytes
from megazero.planner.run_plan import plan_config, telling_stages
from megazero.planner.search.candidates import Candidate, candidates
from megazero.planner.search.search import SAME_SIZES, ClosedTerms, _varied
from megazero.planner.time.devices import Constant, Device, load_device
from megazero.planner.time.network import Network
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


def test_a_shard_of_a_node_fills_it_and_leaves_none() -> None:
    """Two nodes of 8: tensor-parallel ranks are a part of the node; a copy is on each node."""
    config, fixed = parse(f"{LONG} --global-batch-size 16".split()), {"recompute": "none", "zero-stage": 2}
    sizes = {(c.tp, c.cp, c.pp, c.shard) for c in candidates(config, 16, H100, fixed)}
    for tp, cp, pp in {each[:3] for each in sizes}:
        layout = Layout(pp, 16 // (tp * cp * pp), tp, cp=cp)
        shards = {shard for *axes, shard in sizes if axes == [tp, cp, pp]}
        groups = [replace(layout, shards=n).groups("shard") for n in shards - {0}]
        assert all(len({rank // 8 for rank in ranks}) == 1 for group in groups for ranks in group), (tp, cp, pp)
        fills = pp == 1 and 1 < 8 // tp < layout.data
        assert shards == {0, *([8 // tp] if fills else [])} or pp > 1, (tp, cp, pp, shards)
    assert {(tp, shard) for tp, _, pp, shard in sizes if shard and pp == 1} == {(1, 8), (2, 4), (4, 2)}


def test_a_layout_is_ranked_by_the_links_of_its_own_groups() -> None:
    """Every axis counts: which ranks a node has, and how many groups share its cards."""
    config = parse(f"{LONG} {EXPERTS} --global-batch-size 16".split())
    found = list(candidates(config, 16, H100, {"recompute": "none", "micro-batch-size": 1, "zero-stage": 1}))
    terms, chosen = ClosedTerms(config, 16, H100), {(c.sizes, c.pp, c.shard): c for c in found if c.schedule == "1f1b"}
    assert len({sizes for sizes, _, _ in chosen}) > 8 and {pp for _, pp, _ in chosen} == {1, 2, 4}
    for key, c in chosen.items():
        groups = Network(H100, make_layout(c.apply(config), 16)).groups
        assert terms.network(*key).groups == groups, c


@for_each("experts", [False, True])
def test_layouts_of_the_same_sizes_leave_room_for_others(experts: bool) -> None:
    """However many of the best-ranked layouts differ in policies alone, layouts of every size of an axis are tried."""
    plain = Candidate(2, 2, 2, "1f1b", 1, 1, 0, "none", False, True, 1, 2, 1)
    others = [plain, *(plain._replace(**{axis: 4}) for axis in ("tp", "cp", "pp", "ep", "etp"))]
    others += [plain._replace(schedule="zero-bubble")] if experts else []
    ranked = [
        (float(at), c._replace(zero_stage=n % 4, micro_batch=1 + n)) for at, c in enumerate(others) for n in range(9)
    ]
    found = [c._replace(zero_stage=1, micro_batch=1) for c in _varied(ranked, experts)]
    assert found == [c for c in others for _ in range(SAME_SIZES)]


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


@for_each(
    "schedule, length, pp, batches",
    [
        ("1f1b", 64, 2, (1, 2, 3)),
        ("1f1b", 2048, 2, (1, 2)),
        ("gpipe", 64, 2, (1, 3)),
        ("zero-bubble-v", 64, 2, (3,)),
        ("interleaved", 64, 2, (5,)),
        ("1f1b", 64, 4, (4, 5)),
        ("zero-bubble-v", 64, 4, (12,)),
        ("interleaved", 64, 4, (6, 12)),
    ],
)
def test_the_bound_of_memory_is_one_at_the_borders_of_a_schedule(
    schedule: str, length: int, pp: int, batches: tuple[int, ...]
) -> None:
    """Batches are fewer than stages, as many, or the fewest whose gradients add up while activations are held.

    Weights are so large that gradients which are not held yet exceed the estimate; and of long samples, so does a
    micro-batch more. Four stages have two tensor-parallel ranks each.
    """
    line = f"--num-layers {2 * pp} --hidden-size 256 --num-attention-heads 4 --seq-length {length} --vocab-size 64"
    chunks = 1 if schedule in ("1f1b", "gpipe") else 2
    tp = pp // 2
    c = Candidate(tp, 1, pp, schedule, chunks, 0, 0, "none", False, False, 1)
    config = parse(f"{line} --precision bf16 --global-batch-size 1".split())
    terms = ClosedTerms(config, pp * tp, H100)
    for count in batches:
        terms.config = with_values(config, {"global-batch-size": count})  # of which no cached value depends
        changed, layout = resolve(c.apply(terms.config), pp * tp, 0, declare)
        peak = max(stage_bytes(changed, layout, stage, "cuda").peak for stage in range(pp))
        assert (0.9 if pp == 2 else 0.8) * peak < terms.memory(c) <= peak, (count, terms.memory(c) / peak)


@for_each(
    "length, axes",
    [
        (64, {"pp": 2, "zero_stage": 1}),
        (64, {"pp": 2, "zero_stage": 3, "shard": 2}),
        (64, {"tp": 2, "zero_stage": 2}),
        (2048, {"tp": 2, "recompute": "full", "partition": True}),
        (2048, {"cp": 2, "zero_stage": 1}),
    ],
)
def test_the_bound_of_memory_is_near_the_estimate_with_every_axis(length: int, axes: dict[str, Any]) -> None:
    """An axis that divides weights, states or activations in one of the two alone would set them apart."""
    c = Candidate(1, 1, 1, "1f1b", 1, 0, 0, "none", False, False, 1)._replace(**axes)
    line = f"--num-layers 8 --hidden-size 256 --num-attention-heads 4 --seq-length {length} --vocab-size 64"
    config = parse(f"{line} --precision bf16 --global-batch-size 8".split())
    changed, layout = resolve(c.apply(config), 4, 0, declare)
    stages = [stage_bytes(changed, layout, stage, "cuda") for stage in range(layout.pp)]
    terms, peak = ClosedTerms(config, 4, H100), max(stage.peak for stage in stages)
    assert 0.7 * peak < terms.memory(c) <= peak, terms.memory(c) / peak
    at_rest = stages[0].memory["parameters"] + stages[0].memory["optimizer"]
    assert 0.97 * at_rest <= terms._held(c).rest <= at_rest, terms._held(c).rest / at_rest


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
    ranked, simulated = ratios(config, world, device, (plain._replace(**faster), plain._replace(**slower)))
    assert ranked == pytest.approx(ratio, rel=0.08)
    assert simulated == pytest.approx(ratio, rel=0.08)


EVERY, EACH = f"{SHORT} --num-layers 12 --num-attention-heads 12 --hidden-size 768", {"tp": 2, "cp": 3}


def ratios(config: Config, world: int, device: Device, both: Sequence[Candidate]) -> tuple[float, float]:
    """Return the seconds of the first layout over those of the second, by the formulas and by the simulation."""
    terms = ClosedTerms(config, world, device)
    ranked = [terms.seconds(c) for c in both]
    simulated = [step_parts(StepPrograms(*resolve(c.apply(config), world, 0, declare)), device).seconds for c in both]
    return ranked[0] / ranked[1], simulated[0] / simulated[1]


@for_each(
    "flags, world, device, one, other",
    [
        # context-parallel ranks share the tokens of a large head too
        (f"{LONG.replace('8192', '2048')} --vocab-size 500000", 2, H100, {"cp": 2}, {}),
        # a stage rebuilds the inputs of its own blocks
        (f"{SHORT} --num-layers 8", 8, slow_network(), {"partition": True}, {}),
        # every axis, and no two equal: stages share blocks, weights and messages, and keep their own gradients
        *(
            (EVERY, 120, slow_network(), EACH | {"pp": 4}, other)
            for other in (EACH | {"pp": 2}, EACH | {"tp": 4, "pp": 2})
        ),
        (EVERY, 120, slow_network(), EACH | {"pp": 4, "schedule": "interleaved", "chunks": 3}, EACH | {"pp": 4}),
        (EVERY, 30, slow_network(), EACH | {"zero_stage": 2, "shard": 5}, {"tp": 3, "cp": 2, "zero_stage": 2}),
        (EVERY, 30, slow_network(), EACH | {"zero_stage": 1}, EACH | {"zero_stage": 3, "shard": 3}),
        # experts are reduced over ranks of their own: with ep 2, over half as many as other weights
        *(
            (
                f"{SHORT} {EXPERTS}",
                8,
                slow_network(),
                {"ep": 2, "zero_stage": 1, "shard": n},
                {"ep": 2, "zero_stage": 1},
            )
            for n in (2, 4)
        ),
    ],
)
def test_formulas_follow_the_simulation(
    flags: str, world: int, device: Device, one: dict[str, object], other: dict[str, object]
) -> None:
    plain = Candidate(1, 1, 1, "1f1b", 1, 0, 0, "none", False, False, 1)
    if "partition" in one:
        plain = plain._replace(tp=2, pp=4, recompute="full")
    config = parse(f"{flags} --grad-dtype fp32 --global-batch-size {40 if flags is EVERY else 32}".split())
    ranked, simulated = ratios(config, world, device, (plain._replace(**one), plain._replace(**other)))
    assert ranked == pytest.approx(simulated, rel=0.03)
