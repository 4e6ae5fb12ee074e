"""Plans and searches of models with experts: imbalance, bounds of memory, layouts of experts."""

import itertools
import random
from collections.abc import Iterator
from itertools import count

import pytest
from rich.console import Console

from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.layers import stage_units
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.plan.program.rank_spec import rank_spec
from megazero.flags.cli import parse
from megazero.flags.resolve import resolve
from megazero.planner.bytes.capacity import estimated, least
from megazero.planner.layouts import least_layout
from megazero.planner.run_plan import as_json, make_plan, plan_config
from megazero.planner.search.candidates import Sizes, candidates
from megazero.planner.search.search import ClosedTerms
from megazero.planner.search.search_report import run_search, search_command
from megazero.planner.sizes import LayerSizes
from megazero.planner.time.devices import load_device
from megazero.planner.trace.kernel_records import LayerEvents, Operator
from megazero.planner.trace.trace import trace
from tests.helpers.table import for_each

# 64 tokens, 2 experts of each: 128 rows, of width 48, in 8 experts of inner width 24
MODEL = (
    "--architecture mixtral --num-layers 2 --hidden-size 48 --num-attention-heads 4 --seq-length 64 --vocab-size 300 "
    "--num-experts 8 --moe-ffn-hidden-size 24 --micro-batch-size 1 --global-batch-size 8 --precision bf16"
)
CLUSTER = "--plan --world-size 4 --device-type h100-80gb"
ROWS = 128


def test_the_least_layout_has_as_few_replicas_as_the_experts_allow() -> None:
    for tp, cp, ep, expert_tp in itertools.product((1, 2, 3), (1, 2, 3), (1, 2, 6, 8), (0, 1, 2)):
        found = least_layout(tp, cp, ep, expert_tp)
        each = ep * (expert_tp or tp)  # ranks that share the experts
        assert found == Layout(dp=next(dp for dp in count(1) if dp * cp * tp % each == 0), tp=tp, cp=cp, ep=ep,
                               expert_tp=expert_tp)  # fmt: skip


def traced(flags: str) -> tuple[LayerSizes, LayerEvents]:
    config, layout, device = plan_config(parse(f"{MODEL} {CLUSTER} {flags}".split()))
    spec = rank_spec(config, layout, 0, declare)
    specs = stage_units(declare(config.model, layout.tp), layout, 0, ())
    return trace(config, layout, spec.layers["blocks.1"], specs, device.kind)


def grouped(events: LayerEvents) -> Iterator[int]:
    for event in (*events.forward, *events.backward):
        if isinstance(event, Operator) and event.product is not None and "grouped" in event.name:
            yield event.product.flops


@for_each(("ep", "given", "factor"), [(2, 1.5, 1.5), (4, 1.25, 1.25), (4, 3, 3), (2, 7, 2), (1, 3, 1)])
def test_the_busiest_rank_computes_and_keeps_more_rows(ep: int, given: float, factor: float) -> None:
    """All rows arrive at one rank at most."""
    flags = f"--expert-model-parallel-size {ep}"
    even, events = traced(flags)
    more, busy = traced(f"{flags} --moe-plan-imbalance {given}")
    products = list(grouped(events))
    inner, h = 24, 48
    assert sum(products) == 9 * 2 * ROWS * inner * h  # gate, value and down; each forward and twice backward
    assert list(grouped(busy)) == [flops * factor for flops in products]
    kept = 8 + 2 * h + 4 + 2 * 3 * inner  # place, row, weight, gate and value before and after the activation
    assert sum(more.saved) - sum(even.saved) == (factor - 1) * ROWS * kept
    # rows sent back, and their gradients; all but those of this rank's own tokens
    back = 2 * h + 2 * h + 4
    away = (ep - 1) / ep * (factor - 1) * ROWS
    sent = sum(each["ep"] for each in (more.forward, more.backward))
    assert sent - sum(each["ep"] for each in (even.forward, even.backward)) == away * back


def test_plan_json_has_the_axes_of_experts() -> None:
    flags = "--tensor-model-parallel-size 4 --sequence-parallel --expert-model-parallel-size 4 --world-size 16"
    plan = make_plan(*plan_config(parse(f"{MODEL} {CLUSTER} {flags} --expert-tensor-parallel-size 2".split())))
    wanted = {"pp": 1, "dp": 4, "cp": 1, "tp": 4, "ep": 4, "etp": 2, "shard": 4, "chunks": 1}
    assert as_json(plan)["layout"] == wanted


@for_each(
    ("ep", "given", "factor", "sent", "received"),
    [
        (1, 1, 0.5, 0.5, 0.5),
        (4, 1, 0.5, 0.5, 0.5),
        (4, 3, 1.25, 1, 1.25),
        (4, 1.125, 1.25, 1, 1.125),
        (2, 2, 0.25, 0.25, 0.25),
    ],
)
def test_a_capacity_bounds_what_the_busiest_rank_has(
    ep: int, given: float, factor: float, sent: float, received: float
) -> None:
    """Experts have room for `factor` times their even share. Weights of choices are exchanged."""
    flags = f"--expert-model-parallel-size {ep} --context-parallel-size 2 --seq-length 128 --kv-channels 16"
    even, events = traced(flags)
    less, bounded = traced(f"{flags} --moe-plan-imbalance {given} --moe-expert-capacity-factor {factor}")
    assert list(grouped(bounded)) == [flops * received for flops in grouped(events)]
    h, away = 48, (ep - 1) / ep * ROWS
    there, back = 2 * h + 4, 2 * h  # a row and its weight; a result
    table = (even.forward["ep"] - away * (there + back)) if ep > 1 else 0
    assert less.forward["ep"] == table + away * (there * sent + back * received)
    assert (
        less.forward["cp"] - even.forward["cp"] == 2 * (128 * 2) * 4
    )  # weights and numbers of all choices of a sample


H100 = load_device("h100-80gb")
BOUNDED = f"{MODEL} --num-layers 6 --plan-search --world-size 8 --device-type h100-80gb"
# experts with a shared one, in some layers only; few experts; wide ones, which hold nearly all weights
VARIED = (
    "--moe-layer-freq DE --moe-shared-expert-intermediate-size 16",
    "--num-experts 4",
    "--moe-ffn-hidden-size 512",
    "--moe-expert-capacity-factor 0.3",
)


@pytest.mark.second
@pytest.mark.long
@for_each("options", VARIED)
def test_bounds_of_memory_are_bounds_with_experts(options: str) -> None:
    """Experts are on more ranks than attention, or on fewer; then their states are sharded over more ranks."""
    config = parse(f"{BOUNDED} {options}".split())
    terms, rng = ClosedTerms(config, 8, H100), random.Random(options)
    found = list(candidates(config, 8, H100))
    divided = [c for c in found if c.ep > 1 and c.zero_stage], [c for c in found if (c.tp, c.ep, c.etp) == (4, 1, 1)]
    assert all(divided) and {c.ep for c in found} == {1, 2, 4} | ({8} if "4" not in options.split() else set())
    for candidate in [*rng.sample(divided[0], 4), *rng.sample(divided[1], 4)]:
        changed, layout = resolve(candidate.apply(config), 8, 0, declare)
        peak = 0
        for stage in range(layout.pp):
            bound, whole = least(changed, layout, stage), estimated(changed, layout, stage, "cuda")
            assert bound.total <= whole.total, (candidate, stage)
            for kind in ("parameters", "optimizer"):
                assert bound.device[kind] == pytest.approx(whole.device[kind], rel=0.02), (candidate, stage)
            peak = max(peak, whole.total)
        assert terms.memory(candidate) <= peak, candidate


@pytest.mark.second
@pytest.mark.long
def test_a_search_finds_the_best_division_of_experts(capsys: pytest.CaptureFixture[str]) -> None:
    """Experts that hold nearly all weights: divided over ranks, or gathered. Its command line plans the same time."""
    asked = "--moe-ffn-hidden-size 3072 --hidden-size 512 --seq-length 256 --kv-channels 64"
    argv = f"{MODEL} {asked} --world-size 8 --device-type h100-80gb".split()
    plans = run_search(parse([*argv, "--plan-search"]), [*argv, "--plan-search"], Console(width=200))
    printed = capsys.readouterr().out
    best, columns = plans[0], next(line for line in printed.splitlines() if "step s" in line)
    assert [" ep " in columns, " etp " in columns] == [True, True]
    for ep in (1, 2, 4, 8):
        for stage in (0, 1, 2, 3):
            flags = f"--expert-model-parallel-size {ep} --zero-stage {stage} --plan"
            assert make_plan(*plan_config(parse([*argv, *flags.split()]))).seconds >= best.seconds, flags
    given = parse([*argv, "--plan-search"])
    for plan in plans:
        chosen = search_command(plan, given, [*argv, "--plan-search"]).split("--nproc 8 ")[1].split()
        again = plan_config(parse([*chosen, *argv[-4:], "--plan"]))
        assert make_plan(*again).seconds == plan.seconds and again[1] == plan.layout


@pytest.mark.second
@pytest.mark.long
def test_a_model_without_experts_has_no_divisions_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    argv = (
        "--num-layers 2 --hidden-size 48 --num-attention-heads 4 --seq-length 64 --vocab-size 300 --plan-search "
        "--global-batch-size 8 --world-size 4 --device-type h100-80gb --expert-model-parallel-size 1"
    ).split()
    assert {(c.ep, c.etp) for c in candidates(parse(argv), 4, H100)} == {(1, 0)}
    run_search(parse(argv), argv, Console(width=200))
    assert " ep " not in capsys.readouterr().out


@pytest.mark.second
def test_divided_experts_are_sent_to_fewer_ranks() -> None:
    """On eight ranks that hold an eighth of the experts each, ZeRO-3 gathers and reduces the dense weights alone."""
    config = parse(f"{BOUNDED} --moe-ffn-hidden-size 4096".split())
    terms, seconds = ClosedTerms(config, 8, H100), {}
    for c in candidates(config, 8, H100):
        if (c.tp, c.pp, c.zero_stage, c.shard, c.recompute, c.micro_batch) == (1, 1, 3, 0, "none", 1):
            seconds[c.ep] = terms._units(c, 1, 0.0, 0.0)
    block, table = terms.numel(Sizes(1, 1))["dense"]
    experts, dense = 3 * 48 * 4096 * 8, 6 * block + table
    assert terms.numel(Sizes(1, 1, 8))["expert"] == (experts // 8, 0)
    network, (weights, gradients, *_) = terms.network(Sizes(1, 1, 8), 1, 0), terms.rates

    def passes(*units: int) -> float:
        return sum(2 * network.one_pass("shard", n * weights) + network.one_pass("shard", n * gradients) for n in units)

    update = seconds[8] - passes(dense)
    assert update > 0 and seconds[1] - passes(dense, 6 * experts) == pytest.approx(update)
