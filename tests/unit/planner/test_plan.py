"""`--plan`: the time model against formulas worked out by hand, its bytes against the estimate, and refusals."""

import importlib.util
import json
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from rich.console import Console

import pretrain_gpt
from megazero.command.predictions import predict
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.flat_layout import Matrices
from megazero.engine.plan.layout.layers import stage_units
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.plan.program.operations import (
    Backward,
    Fetch,
    Forward,
    Gather,
    GradNorm,
    Reduce,
    Start,
    Update,
    Wait,
)
from megazero.engine.plan.program.program import program
from megazero.engine.plan.program.rank_spec import rank_spec
from megazero.flags.cli import parse, read
from megazero.flags.flag_names import with_values
from megazero.flags.resolve import resolve
from megazero.planner.bytes.estimate import Few, estimate, stage_bytes
from megazero.planner.imbalance import update_imbalance
from megazero.planner.plan_report import summary
from megazero.planner.run_plan import Plan, advice, make_plan, plan_config
from megazero.planner.search import search
from megazero.planner.search.candidates import candidates
from megazero.planner.search.search import Search
from megazero.planner.search.search_report import run_search, search_command
from megazero.planner.sizes import Moved
from megazero.planner.state_shares import updated_bytes
from megazero.planner.time.costs import Roofline, StepCosts
from megazero.planner.time.devices import Constant, Curves, Device, interpolate, known_devices, load_device
from megazero.planner.time.network import Network, ranks_of_axis
from megazero.planner.time.simulate import simulate
from megazero.planner.time.step_time import StepPrograms, step_parts, step_time
from megazero.planner.trace.kernel_records import Issue, Operator, Product
from megazero.planner.trace.trace import model_flops, trace
from tests.helpers.table import for_each

SMALL = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 128 --precision fp32"


def simple(**constants: float) -> Device:
    """A device of round numbers: 1 TFLOP/s, 1 TB/s, 100 GB/s in nodes of 4, 10 GB/s per node between, no latency."""
    round_numbers = {
        "memory.capacity": 1e10,
        "memory.reserved": 0.0,
        "memory.bandwidth": 1e12,
        "host.bandwidth": 1e10,
        "node.devices": 4,
        "node.bandwidth": 1e11,
        "node.latency": 0.0,
        "cluster.bandwidth": 1e10,
        "cluster.latency": 0.0,
        "compute.units": 1,
        "compute.tile_rows": 1,
        "compute.tile_columns": 1,
    }
    round_numbers |= {f"compute.{precision}": 1e12 for precision in ("fp16", "bf16", "fp32", "fp64")}
    round_numbers |= {f"{name}.fraction": 1.0 for name in ("memory", "compute", "node", "cluster")}
    round_numbers |= {"compute.attention": 1.0, "overhead.kernel": 0, "overhead.call": 0, "overhead.operation": 0}
    named = {name.replace("_", ".", 1): value for name, value in constants.items()}
    values = {name: Constant(value, value, value, "") for name, value in (round_numbers | named).items()}
    return Device("simple", "cuda", values, {})


def test_a_product_takes_its_flops_or_its_bytes() -> None:
    """2 m n k FLOPs at 1 TFLOP/s, or bytes at 1 TB/s; 100 tiles on 80 units take two waves."""
    roofline = Roofline(simple())
    operator = Operator("mm", 4 * 3 * 1000**2, "fp32", Product(1, 1000, 1000, 1000))
    assert roofline.seconds(operator) == pytest.approx(2e-3)
    assert roofline.seconds(operator._replace(num_bytes=10**10)) == pytest.approx(1e-2)
    assert roofline.seconds(Operator("gelu", 10**9, "fp32")) == pytest.approx(1e-3)
    tiles = Roofline(simple(compute_units=80, compute_tile_rows=256, compute_tile_columns=128))
    whole = Product(1, 2560, 1280, 1024)  # 10 x 10 tiles
    assert tiles.product(whole, "fp32") == pytest.approx(whole.flops / 1e12 * 160 / 100)


def test_rings_and_messages_by_hand() -> None:
    """Nodes of 4 with one network card of 10 GB/s: a ring within a node, one over nodes, and four that share cards."""
    network = Network(simple(node_latency=1e-6, cluster_latency=1e-5), Layout(pp=2, dp=4, tp=4))
    size = 4e9
    assert network.one_pass("tp", size) == pytest.approx(3e-6 + size * 3 / 4 / 1e11)
    # 4 ranks on 4 nodes, and 4 such groups leave every node: 2.5 GB/s each
    assert network.groups["shard"] == ranks_of_axis(4, 4, 4)
    assert network.one_pass("shard", size) == pytest.approx(3e-5 + size * 3 / 4 / 2.5e9)
    assert network.all_reduce("tp", size) == pytest.approx(4e-6 + 2 * size * 3 / 4 / 1e11)  # a tree has 2 hops up
    # all four ranks of a node send at once
    assert network.message(size, 0, 1) == pytest.approx(1e-5 + size / 2.5e9)
    # tensor parallelism over two nodes: one group leaves each node, at the card's 10 GB/s
    wide = Network(simple(), Layout(dp=1, tp=8))
    assert wide.one_pass("tp", size) == pytest.approx(size * 7 / 8 / 1e10)


@for_each("flags", ["", "--precision bf16 --reset-attention-mask --tokenizer byte"])
def test_a_traced_block_has_narayanans_flops_and_six_sums(flags: str) -> None:
    """24 b s h^2 and 4 b s^2 h, the causal half of it, per rank; twice that backward; 2 + 1 + 2 all-reduces.

    A recompute leaves out the MLP's second product, 8 b s h^2, and its sum. Documents may be as long as a sample.
    """
    flags = f"{SMALL} --tensor-model-parallel-size 2 --recompute full --micro-batch-size 3 {flags}"
    config, layout = resolve(parse(flags.split()), 2, 0, declare)
    spec, specs = (
        rank_spec(config, layout, 0, declare),
        stage_units(declare(config.model, layout.tp), layout, 0),
    )
    events = trace(config, layout, spec.layers["blocks.1"], specs, "cuda").events
    tokens, hidden, length = 3 * 32, 64, 32

    def products(found: tuple[object, ...]) -> tuple[int, int]:
        ops = [event for event in found if isinstance(event, Operator)]
        return sum(op.product.flops for op in ops if op.product), sum(op.attention_flops for op in ops)

    matrices, attention = 24 * tokens * hidden**2 // 2, 4 * tokens * length * hidden // 2 // 2
    assert products(events.forward) == (matrices, attention)
    assert products(events.recompute) == (matrices * 2 // 3, attention)
    assert products(events.backward) == (2 * matrices, attention * 5 // 2)
    apart = trace(config, layout, spec.layers["blocks.1"], specs, "cuda", at_once=False).events
    assert [products(found) for found in (apart.backward, apart.weight_gradients)] == [
        (matrices, attention * 5 // 2),
        (matrices, 0),
    ]
    sums = [sum(isinstance(e, Issue) for e in found) for found in (events.forward, events.recompute, events.backward)]
    assert sums == [2, 1, 2]


def test_waits_are_told_apart() -> None:
    """A gather of 5 behind a forward of 1: 4 are waited for. An update runs with the computations."""
    gather = Gather("blocks.0")
    ops = [Start(gather), Update("head"), Wait(gather)]
    cost = {Gather: 5.0, Update: 1.0}
    timing = simulate([list(ops)], lambda op: cost[type(op)])
    assert timing.seconds == 5.0 and dict(timing.spent[0]) == {"Update": 1.0, "dp": 4.0}


@for_each("seconds, slowed", [(1.2, 4.4), (9.0, 6.0), (0.0, 4.0)])
def test_a_layer_computes_more_slowly_while_a_collective_runs(seconds: float, slowed: float) -> None:
    """A forward of 4, half as slow again: 1.2 next to a collective do the work of 0.8; a copy from the host is free."""
    forward, gather, fetch = Forward("blocks.0", 0, graph=True), Gather("blocks.1"), Fetch("blocks.0", 0)
    cost = {forward: 4.0, gather: seconds, fetch: 7.0}
    timing = simulate([[Start(fetch), Start(gather), forward]], lambda op: cost[op], overlap=0.5)
    assert timing.seconds == pytest.approx(slowed) and timing.spent[0]["Forward"] == pytest.approx(slowed)


def test_a_plan_slows_layers_next_to_collectives() -> None:
    """ZeRO 3 over two ranks computes longer, and the longer the higher the constant; one device does not."""
    device = load_device("h100-80gb")
    known = device.constants["overhead.overlap"]
    slower = replace(device, constants=device.constants | {"overhead.overlap": known._replace(value=0.9)})
    parts = {}
    for world in (1, 2):
        flags = "--num-layers 2 --hidden-size 1024 --num-attention-heads 8 --seq-length 1024 --vocab-size 512"
        config, layout = resolve(
            parse(f"{flags} --precision bf16 --zero-stage {3 * (world - 1)}".split()), world, 0, declare
        )
        parts[world] = [step_time(config, layout, each, with_range=False).expected.parts for each in (device, slower)]
    assert parts[1][0] == parts[1][1]
    assert parts[2][1]["compute"] > parts[2][0]["compute"] > parts[1][0]["compute"]


def test_starting_a_transfer_takes_time_of_the_computation() -> None:
    """A time of 0.5 for each transfer; an axis of one rank starts none."""
    gather, update = Gather("blocks.0"), Update("head")
    ops = [Start(gather), update, Wait(gather)]
    found = [simulate([list(ops)], lambda op, g=g: {gather: g, update: 1.0}[op], 0.5).seconds for g in (0.25, 0.0, 5.0)]
    assert found == [1.5, 1.0, 5.5]


def test_an_operator_is_as_slow_as_its_own_ceiling_or_memory() -> None:
    """GELU at 1 GB/s is independent of memory; above that, memory limits it."""
    slow = Roofline(replace(simple(memory_fraction=0.5), operators={"gelu": 1e9}))
    assert [slow.memory(name, 2e9) for name in ("gelu", "add")] == pytest.approx([4.0, 4e-3])
    fast = replace(simple(), operators={"gelu": 1e13}, curves=Curves(elementwise=((1e3, 4e12), (1e9, 1e11))))
    assert Roofline(fast).memory("gelu", 1e9) == pytest.approx(1e-2)


def test_attention_is_as_fast_as_its_heads_are_wide() -> None:
    """1e9 FLOPs at 1 TFLOP/s x 0.5; heads of up to 64 at 0.25, where the device has that constant."""
    narrow, wide = (Operator("attention", 1, "fp32", None, 10**9, head_dim) for head_dim in (64, 80))
    both = Roofline(simple(compute_attention=0.5, compute_attention_64=0.25))
    assert [both.seconds(op) for op in (narrow, wide)] == pytest.approx([4e-3, 2e-3])
    assert Roofline(simple(compute_attention=0.5)).seconds(narrow) == pytest.approx(2e-3)


@for_each("flags", ["", "--precision bf16 --reset-attention-mask --tokenizer byte"])
def test_a_block_takes_what_the_host_needs_to_issue_it(flags: str) -> None:
    """Forward: norm, product, attention, product, sum; norm, product, GELU, product, sum. All heads are 16 wide."""
    config, layout = resolve(parse([*SMALL.split(), *flags.split()]), 1, 0, declare)
    spec = rank_spec(config, layout, 0, declare)
    costs = StepCosts(config, layout, spec, simple(overhead_call=2e-3, overhead_operation=3e-3))
    forward = costs.of_layer(Forward("blocks.1", 0, graph=True))
    assert forward.seconds == pytest.approx(10 * 2e-3 + 3e-3)
    events = costs.events["blocks.0", True]
    found = [e.head_dim for e in (*events.forward, *events.backward) if isinstance(e, Operator) and e.attention_flops]
    assert found == [16, 16]


def test_memory_of_communicators_is_counted() -> None:
    """Half a GB each, besides one GB. That of all ranks; of axes; of links, two for every direction of three stages."""
    device = simple(memory_reserved=1e9, memory_communicator=5e8)
    table = [
        (Layout(), 0),
        (Layout(dp=8), 1 + 1),
        (Layout(dp=2, tp=2), 1 + 2),
        (Layout(dp=8, shards=4), 1 + 3),  # dp, its shards, their replicas
        (Layout(pp=2), 1 + 1 + 2),  # the ends of two stages are pp itself
        (Layout(pp=4, dp=2, tp=2), 1 + 3 + 1 + 2 * 2),  # and the ends, which share the token table
        (Layout(pp=4, chunks=2, v_shaped=True), 1 + 1 + 4 * 2),  # one rank holds both ends; two lanes each way
    ]
    for layout, count in table:
        assert device.usable_bytes(layout) == 9 * 10**9 - count * 5 * 10**8, layout


def test_a_step_of_zero_1_by_hand() -> None:
    """Over a slow link a step is (g + w) Psi (N-1)/N / bandwidth: gradients before the norm, weights after it. The
    optimizer moves 36 bytes per owned element in fp32: 32 in AdamW and clipping, 4 for the norm.
    """
    config, layout = resolve(parse([*SMALL.split(), "--zero-stage=1"]), 4, 0, declare)
    steps = StepPrograms(config, layout)
    psi = sum(unit.numel for unit in steps.specs[0].units.values())
    found = step_parts(steps, simple(node_bandwidth=1e6))
    assert found.seconds == pytest.approx((4 + 4) * psi * 3 / 4 / 1e6, rel=0.01)
    assert found.parts["dp"] == pytest.approx(found.seconds, rel=0.01)
    quick = step_parts(steps, simple(node_bandwidth=1e15))
    assert quick.parts["optimizer"] == pytest.approx(36 * psi / 4 / 1e12, rel=0.01)


@pytest.mark.second
@for_each("flags", ["--checkpoint-in-cpu", "--contiguous-checkpointing", "--partition-activations"])
def test_copies_of_kept_inputs_take_time(flags: str) -> None:
    """A whole input on the device is kept without a copy."""
    for more in ("", flags):
        line = f"{SMALL} --tensor-model-parallel-size 2 --recompute full {more}"
        found = step_parts(StepPrograms(*resolve(parse(line.split()), 2, 0, declare)), simple())
        assert bool(found.parts["copies"]) == bool(more), more


def test_ranks_that_compute_on_a_node_slow_each_other_down() -> None:
    """Ranks of other nodes do not, and a node is not always full. Nodes of 4 here."""
    device = replace(simple(), curves=Curves(contention=((1.0, 1.0), (5.0, 3.0))))
    config = parse(SMALL.split())
    for world, slower in ((1, 1.0), (3, 2.0), (4, 2.5), (64, 2.5)):
        changed, layout = resolve(config, world, 0, declare)
        costs = StepCosts(changed, layout, rank_spec(changed, layout, 0, declare), device)
        assert costs.roofline.slower == pytest.approx(slower), world


@for_each("schedule, chunks, bubble", [("1f1b", 1, 3 / 8), ("interleaved", 2, 3 / 16), ("gpipe", 1, 3 / 8)])
def test_the_bubble_is_the_schedules(schedule: str, chunks: int, bubble: float) -> None:
    """(p - 1) / (m v) of the busiest rank's time, where embedding and head are next to nothing; all parts add up."""
    model = "--num-layers 8 --hidden-size 512 --num-attention-heads 4 --seq-length 512 --vocab-size 16"
    stages = f"--pipeline-model-parallel-size 4 --pipeline-schedule {schedule} --virtual-pipeline-stages {chunks}"
    config, layout = resolve(parse([*model.split(), *stages.split(), "--global-batch-size=8"]), 4, 0, declare)
    steps = StepPrograms(config, layout)
    found = step_parts(steps, simple(cluster_bandwidth=1e15, node_bandwidth=1e15))
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert found.parts["bubble"] / found.parts["compute"] == pytest.approx(bubble, rel=0.05)


@for_each("stages", ["", "--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble"])
def test_a_step_of_unequal_shares_takes_as_long_as_the_longest(stages: str) -> None:
    """8 samples on three replicas: bytes and seconds are those of 9, tokens and FLOPs those of 8."""
    world, found = 6 if stages else 3, []
    for batch in (8, 9):
        asked = f"{SMALL} {stages} --zero-stage 2 --global-batch-size {batch} --world-size {world}"
        found.append(make_plan(*plan_config(parse(f"{asked} --plan --device-type h100-80gb".split()))))
    ours, whole = found
    assert ours.layout.dp == 3 and ours.seconds == whole.seconds
    assert [(stage.memory, stage.traffic) for stage in ours.stages] == [(s.memory, s.traffic) for s in whole.stages]
    assert (ours.tokens, whole.tokens) == (8 * 32, 9 * 32)
    assert ours.tflops == pytest.approx(whole.tflops * 8 / 9)


def test_a_plan_names_padding(capsys: pytest.CaptureFixture[str]) -> None:
    asked = f"{SMALL} --plan --world-size 3 --device-type h100-80gb --micro-batch-size 2 --global-batch-size".split()
    pretrain_gpt.main([*asked, "15"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "3 micro-batches of 2, 3 of 18 samples padding" in printed and "warning" not in printed
    pretrain_gpt.main([*asked, "3"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "1 of 3 data-parallel ranks compute only padding: --global-batch-size 3 is 2 x --micro-batch" in printed
    pretrain_gpt.main([*asked, "18"])
    assert "padding" not in capsys.readouterr().out


@pytest.mark.second
def test_a_long_step_is_extended_from_two_short_ones() -> None:
    """Bytes of 40 micro-batches, found from a few, are those of all 40. Seconds nearly: the first round of the
    pipeline, which waits for updated weights, is not quite as the later ones. With stages of unequal length, the waits
    of the busiest one shrink over several rounds; none of its parts is negative.
    """
    interleaved = "--pipeline-schedule interleaved --virtual-pipeline-stages 2"
    large = "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --vocab-size 50257"
    table = [
        (f"{SMALL} --zero-stage 2 --pipeline-schedule 1f1b", 3, 5e-3),
        (f"{SMALL} --zero-stage 2 {interleaved}", 3, 5e-3),
        (f"{large} --precision fp16 --zero-stage 1 {interleaved}", 4, 1e-2),
    ]
    for flags, num_stages, tolerance in table:
        flags = f"{flags} --pipeline-model-parallel-size {num_stages} --global-batch-size 80"
        config, layout = resolve(parse(flags.split()), 2 * num_stages, 0, declare)
        steps = StepPrograms(config, layout)
        assert len(steps.few.counts) == 2 and steps.few.wanted == 40
        device = load_device("a100-80gb")
        whole = StepPrograms(config, layout)
        whole.few = Few(40, (40,))
        schedule = config.parallel.pipeline_schedule
        whole.programs = [[program(spec, schedule, 40) for spec in whole.specs]]
        short, long = step_parts(steps, device), step_parts(whole, device)
        assert short.seconds == pytest.approx(long.seconds, rel=tolerance) and short.rank == long.rank
        assert sum(short.parts.values()) == pytest.approx(short.seconds)
        assert all(seconds > -1e-9 * short.seconds for seconds in short.parts.values()), flags
        for pp in range(num_stages):
            found, wanted = stage_bytes(config, layout, pp, "cuda"), estimate(config, layout, pp * 2, False)
            assert (found.memory, found.traffic) == (wanted.memory, wanted.traffic)
    for stage in range(4):  # without a pipeline, gradients of several micro-batches add up
        config, layout = resolve(parse(f"{SMALL} --zero-stage {stage} --global-batch-size 80".split()), 4, 0, declare)
        found, wanted = stage_bytes(config, layout, 0, "cuda"), estimate(config, layout, 0, False)
        assert (found.memory, found.traffic) == (wanted.memory, wanted.traffic)


@pytest.mark.long
def test_plan_json_has_the_bytes_of_the_estimate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan needs no more than the command line of a run whose data, tokenizer and --save do not exist."""
    flags = f"{SMALL} --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --global-batch-size 8"
    flags += " --train-iters 500"
    elsewhere = f"--data-path {tmp_path}/none --tokenizer {tmp_path}/none --save /proc/none --log-dir {tmp_path}/log"
    asked = "--plan --world-size 8 --device-type h100-80gb"
    pretrain_gpt.main(f"{flags} {elsewhere} {asked}".split())
    printed = capsys.readouterr().out
    plan = json.loads((tmp_path / "log/plan.json").read_text())
    config, layout = resolve(parse(flags.split()), 8, 0, declare)
    # of an h100-80gb: its capacity without that of libraries, and of communicators: all ranks, dp, tp, pp, two of links
    usable = 85_000_000_000 - 700_000_000 - 6 * 400_000_000
    for pp, stage in enumerate(plan["stages"]):
        wanted = estimate(config, layout, pp * 4, needs_staging_buffer=False)
        assert (stage["memory_bytes"], stage["traffic_bytes"]) == (wanted.memory, wanted.traffic)
        assert stage["peak_bytes"] > stage["memory_bytes"]["parameters"] + stage["memory_bytes"]["optimizer"]
        assert sum(stage["at_peak"].values()) == stage["peak_bytes"]
        assert stage["peak_bytes"] + stage["free_bytes"] == usable
    assert len(plan["stages"]) == 2 and plan["fits"] and "limit:" in printed
    seconds = plan["step_seconds"]
    assert plan["tflops_per_device"] == pytest.approx(model_flops(config.model, 8) / seconds / 8 / 1e12)
    assert plan["step_seconds_range"][0] < seconds < plan["step_seconds_range"][1]
    assert plan["tokens_per_second"] * seconds == pytest.approx(8 * 32)
    assert plan["days"] * 24 * 60 * 60 == pytest.approx(500 * seconds)
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "log/plan.png").stat().st_size > 10_000
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were missing
    without = tmp_path / "without"
    pretrain_gpt.main(f"--preset zero-100b --zero-stage 0 {asked} --world-size 16 --log-dir {without}".split())
    printed = capsys.readouterr().out
    assert "DOES NOT FIT" in printed and [path.name for path in without.iterdir()] == ["plan.json"]
    assert re.search(r"^plan.png is not drawn: it needs the Python package matplotlib, .* pip install ", printed, re.M)


@for_each(
    "flags, said",
    [
        ("--plan --world-size 8", "--plan needs --device-type NAME, such as h100-80gb; add it, or drop --plan"),
        (
            "--plan-search --device-type b200",
            "--plan-search needs --device-type NAME, such as h100-80gb, and --world-size N; add both",
        ),
        ("--plan --plan-search --world-size 8 --device-type b200", "use one"),
        ("--world-size 8", "--world-size 8 needs --plan or --plan-search"),
        ("--mtbf 50000", "--mtbf 50000.0 needs --plan; add it, or drop --mtbf"),
        ("--num-experts 4 --architecture llama --moe-plan-imbalance 2", "--moe-plan-imbalance 2.0 needs --plan or"),
        ("--plan --device-type b200 --moe-plan-imbalance 2", "--moe-plan-imbalance 2.0 needs --num-experts E; add"),
        ("--plan --world-size 8 --device-type h10-80gb", "--device-type h10-80gb: .* did you mean h100-80gb"),
        ("--plan --device-type rtx3090", "give a TOML file: a copy of .*scripts/measure_device.py"),
        ("--plan --world-size 7 --device-type b200 --tensor-model-parallel-size 2", "does not divide the 7 ranks"),
        ("--plan --world-size 8 --device-type b200 --vocab-size 0", "--tokenizer and --vocab-size are missing"),
    ],
)
def test_a_plan_refuses(flags: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan_config(parse([*SMALL.split(), *flags.split()]))


@pytest.mark.second
@for_each(
    "model, flags, said, offered",
    [
        ("gpt2-345m", "--micro-batch-size 32", "it fits with {}", "--recompute selective"),
        (
            "llama-7b",
            "",
            "it fits with {}",
            "--recompute full --micro-batch-size 1 --checkpoint-in-cpu --optimizer-cpu-offload",
        ),
        (
            "llama-7b",
            "--optimizer muon",
            "--preset llama-3.2-1b {} is the largest preset that fits",
            "--micro-batch-size 1 --recompute full",
        ),
    ],
)
def test_a_plan_for_one_card_names_what_fits(model: str, flags: str, said: str, offered: str) -> None:
    """Without --world-size it is one device; the named layout fits, and one that does not has no training days."""

    def planned(model: str, more: str) -> tuple[Plan, str]:
        words = f"--preset {model} --global-batch-size 32 --plan --device-type rtx4090-24gb {flags} {more}"
        plan = make_plan(*plan_config(parse(words.split())))
        return plan, "\n".join(summary(plan))

    plan, told = planned(model, "")
    assert plan.layout.world_size == 1 and plan.free < 0 and said.format(offered) in told and " expected (" not in told
    named = re.search(r"--preset (\S+)", said)
    fits, told = planned(named[1] if named else model, offered)
    assert fits.free >= 0 and " expected (" in told and "largest preset" not in told
    flops = model_flops(fits.config.model, 32)
    least, most = (flops / seconds / 165.2e12 for seconds in (fits.time.slow, fits.time.fast))
    assert f", MFU {fits.mfu:.1%} ({least:.1%} to {most:.1%}), " in told and 0.1 < least < fits.mfu < most


FAULTS = {
    "[node]": ("[nodes]", "unknown field `nodes`"),
    "fp16 = ": ("fp8 = ", r"unknown field `fp8` - at `\$.compute`"),
    "devices = { value = 8": ("devices = { value = -8", r"Expected `float` >= 0.0 - at `\$.node.devices.value`"),
    "low = 0.68": ("low = 0.99", r"low 0.99, value 0.82, high 0.86 must ascend - at `\$.compute.fraction`"),
    'source = "DGX and HGX nodes"': ('source = ""', r"length >= 1 - at `\$.node.devices.source`"),
    'kind = "cuda"': ('kind = "tpu"', r"Invalid enum value 'tpu' - at `\$.kind`"),
    "description": (
        "curves = { products = [[2.0, 1.0], [1.0, 1.0]] }\ndescription",
        r"products: x must ascend - at `\$.curves`",
    ),
    "[memory]": ("[memory", "line"),
    "[cluster]": ("[operators]\ngelu = 0\n[cluster]", r"Expected `float` > 0.0 - at `\$.operators"),
}


def test_a_device_file_is_read_by_a_schema(tmp_path: Path) -> None:
    text = (Path(pretrain_gpt.__file__).parent / "scripts/devices/a100-80gb.toml").read_text()
    path = tmp_path / "mine.toml"
    for good, (bad, said) in FAULTS.items():
        assert good in text
        path.write_text(text.replace(good, bad, 1))
        with pytest.raises(ValueError, match=f"--device-type .*mine.toml: .*{said}"):
            load_device(str(path))
    path.write_text(text)
    assert load_device(str(path)).constants == load_device("a100-80gb").constants


def test_every_device_is_sound() -> None:
    """Its constants are faster at their fast end: a step takes less, its memory is no smaller."""
    config, layout = resolve(parse([*SMALL.split(), "--tensor-model-parallel-size=2"]), 64, 0, declare)
    steps = StepPrograms(config, layout)
    assert len(known_devices()) >= 8
    for name in known_devices():
        device = load_device(name)
        seconds = [step_parts(steps, d).seconds for d in (device.at_end(True), device, device.at_end(False))]
        assert seconds == sorted(seconds) and seconds[0] < seconds[2], name
        assert device.usable_bytes(layout) > (20e9 if device.kind == "cuda" else 3e9)


LARGE = ("--hidden-size=2048", "--seq-length=1024")  # products, and not the host, take the time


def test_fp32_products_take_tf32s_rate_where_the_device_has_it() -> None:
    def compute(device: str, *flags: str) -> float:
        config, layout, found = plan_config(
            parse([*SMALL.split(), *LARGE, "--plan", "--world-size=8", f"--device-type={device}", *flags])
        )
        return make_plan(config, layout, found).time.expected.parts["compute"]

    assert compute("a100-80gb") < 0.9 * compute("a100-80gb", "--no-tf32")
    assert compute("v100-32gb") == compute("v100-32gb", "--no-tf32")
    assert compute("a100-80gb", "--precision=bf16") == compute("a100-80gb", "--precision=bf16", "--no-tf32")


def test_curves_are_read_between_their_points() -> None:
    curve = ((1.0, 10.0), (3.0, 20.0))
    assert [interpolate(curve, x) for x in (0.5, 1, 2, 3, 9)] == [10, 10, 15, 20, 20]


def test_less_recompute_is_offered_where_it_fits() -> None:
    config, layout, device = plan_config(
        parse(
            [
                *SMALL.split(),
                *"--recompute full --micro-batch-size 64 --plan --world-size 1 --device-type a100-80gb".split(),
            ]
        )
    )
    plan = make_plan(config, layout, device)
    assert any("--recompute none fits too" in line for line in advice(plan))
    enough = device["memory.reserved"] + plan.stages[0].peak
    on_host = with_values(config, {"checkpoint-in-cpu": True})  # which needs full recompute
    assert not any("fits too" in line for line in advice(plan._replace(config=on_host)))
    tight = replace(device, constants=device.constants | {"memory.capacity": Constant(enough, enough, enough, "")})
    assert not any("fits too" in line for line in advice(plan._replace(device=tight)))


@for_each(
    ("part", "flags", "said", "unsaid"),
    [
        ("tp", "--tensor-model-parallel-size 4 --global-batch-size 1", "--sequence-parallel", "--micro-batch-size"),
        ("tp", "--tensor-model-parallel-size 2 --sequence-parallel", "a smaller --tensor", "--sequence-parallel"),
        ("dp", "--zero-stage 3 --zero-shard-size 2", "--zero-stage 1", "--zero-shard-size"),
        ("dp", "--zero-stage 2 --zero-reduce-every step", "--zero-stage 1", "--zero-reduce-every"),
        ("dp", "--zero-stage 1", "--zero-shard-size", "--zero-stage 1"),
        ("optimizer", "--zero-stage 1", "a larger --global-batch-size", "--zero-stage"),
        ("optimizer", "--zero-stage 0", "--zero-stage 1", "--optimizer-offload-fraction"),
        ("bubble", "--pipeline-model-parallel-size 2", "zero-bubble", "--micro-batch-size"),
        ("bubble", "--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble", "fewer stages", "--pipeline-s"),
        ("recompute", "--recompute selective", "--recompute none", "--recompute selective"),
    ],
)
def test_advice_names_only_flags_that_change_the_run(part: str, flags: str, said: str, unsaid: str) -> None:
    line = f"{SMALL} --global-batch-size 4 {flags} --micro-batch-size 1 --world-size 4 --device-type a100-80gb --plan"
    plan = make_plan(*plan_config(parse(line.split())))
    worst = plan.time.expected._replace(parts={**plan.time.expected.parts, part: plan.seconds / 2})
    (limit,) = [each for each in advice(plan._replace(time=plan.time._replace(expected=worst))) if part in each[:9]]
    assert said in limit and unsaid not in limit, limit


SEARCH = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 128 --vocab-size 128 --precision bf16"


@pytest.mark.second
@pytest.mark.long
def test_a_search_finds_what_no_other_layout_beats(capsys: pytest.CaptureFixture[str]) -> None:
    """The best layout that is printed is as fast as the best of all simulated ones. Its command line gives the same."""
    given = f"{SEARCH} --global-batch-size 4 --recompute full --lr 1e-3".split()
    asked = "--world-size 2 --device-type a100-80gb".split()
    config = parse([*given, "--plan-search", *asked])
    plans = run_search(config, [*given, "--plan-search", *asked], Console(width=200))
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if "scripts/launch.sh --nproc 2" in line]
    flags = lines[0].split("--nproc 2 ")[1].split()
    assert "to train, add --data-path PREFIX --save DIR --log-dir DIR to one of" in printed
    assert "no GPU run has confirmed these" in printed
    assert "--lr" in flags and "--plan-search" not in flags and "--world-size" not in flags
    again = make_plan(*plan_config(parse([*flags, "--plan", *asked])))
    assert again.seconds == plans[0].seconds and again.stages[0].peak == plans[0].stages[0].peak
    device, everything = load_device("a100-80gb"), list[float]()
    for candidate in candidates(config, 2, device):
        changed, layout = resolve(candidate.apply(config), 2, 0, declare)
        everything.append(step_parts(StepPrograms(changed, layout), device).seconds)
    assert len(everything) > 50 and plans[0].seconds <= 1.02 * min(everything)


@pytest.mark.second
@pytest.mark.long
def test_a_search_leaves_out_what_does_not_fit(tmp_path: Path) -> None:
    """All that are found fit; none is found where none fits."""
    text = (Path(pretrain_gpt.__file__).parent / "scripts/devices/a100-80gb.toml").read_text()
    reserved = load_device("a100-80gb").reserved_bytes(Layout(dp=2))
    for usable, fits in ((1.3e8, True), (1e8, False)):
        (tmp_path / "small.toml").write_text(text.replace("value = 8.50e10", f"value = {reserved + usable}"))
        asked = f"--plan-search --world-size 2 --device-type {tmp_path}/small.toml --global-batch-size 2"
        argv = [*SEARCH.split(), *asked.split()]
        plans = run_search(parse(argv), argv, Console(file=(tmp_path / "out").open("w"), width=200))
        assert bool(plans) == fits and all(plan.free >= 0 for plan in plans), usable
        assert [plan.seconds for plan in plans] == sorted(plan.seconds for plan in plans)
    assert "none of" in (tmp_path / "out").read_text()


def test_a_search_keeps_the_flags_of_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its head line names them, and its commands have each flag once. A preset's are not kept."""
    monkeypatch.setattr(search, "SIMULATED", 1)
    preset = tmp_path / "mine.toml"
    preset.write_text("micro-batch-size = 2\n")
    given = "--pipeline-model-parallel-size 2 --pipeline-schedule gpipe --zero-stage 0"
    line = (
        f"--preset {preset} {SEARCH} --global-batch-size 4 {given} --plan-search --device-type a100-80gb --world-size"
    )
    predict(read([*line.split(), "2"]))
    printed = capsys.readouterr().out
    assert f" layouts with {given} on 2 x a100-80gb; 1 of them simulated" in printed
    (command,) = [each for each in printed.splitlines() if "--nproc 2" in each]
    words = command.split("--nproc 2 ")[1].split()
    assert all(words.count(word) == 1 for word in given.split() if word.startswith("--"))
    config = parse(words)
    assert (config.parallel.pipeline_model_parallel_size, config.parallel.pipeline_schedule) == (2, "gpipe")
    assert config.zero.zero_stage == 0 and config.training.micro_batch_size != 2
    with pytest.raises(ValueError, match="--plan-search --sequence-parallel: no layout of 3 ranks allows these flags"):
        predict(read([*line.replace(given, "--sequence-parallel").split(), "3"]))
    small = tmp_path / "small.toml"
    text = (Path(pretrain_gpt.__file__).parent / "scripts/devices/a100-80gb.toml").read_text()
    small.write_text(
        text.replace("value = 8.50e10", f"value = {load_device('a100-80gb').reserved_bytes(Layout(dp=2))}")
    )
    predict(read([*line.replace("a100-80gb", str(small)).split(), "2"]))
    assert "--zero-stage 0 fits on 2 x small; drop some of these flags, use more" in capsys.readouterr().out


def on_nodes(options: str, each: int, cpus: int) -> str:
    tasks = f"--ntasks-per-node={each} --gpus-per-node={each} --cpus-per-task={cpus}"
    return f"sbatch {options} {tasks} scripts/slurm/pretrain.sbatch"


@for_each(
    ("device", "world", "starts"),
    [
        ("h100-80gb", 1, "python pretrain_gpt.py"),
        ("h100-80gb", 6, "bash scripts/launch.sh --nproc 6"),
        ("h100-80gb", 8, "bash scripts/launch.sh --nproc 8"),
        ("h100-80gb", 24, on_nodes("--nodes=3", 8, 8)),
        ("h100-80gb", 12, on_nodes("--nodes=2", 6, 10)),
        ("h100-80gb", 20, on_nodes("--nodes=4", 5, 12)),
        ("gb200", 4, "bash scripts/launch.sh --nproc 4"),
        ("gb200", 8, on_nodes("--nodes=2 --segment=2", 4, 16)),
        ("gb300", 72, on_nodes("--nodes=18 --segment=18", 4, 16)),
        ("gb300", 120, on_nodes("--nodes=30 --segment=15", 4, 16)),
    ],
)
def test_the_command_of_a_search_starts_the_ranks_that_were_planned(device: str, world: int, starts: str) -> None:
    """Nodes x tasks of a node are all ranks: on nodes of 8, and on hosts of 4 in NVLink domains of 72."""
    argv = f"{SMALL} --plan-search --world-size={world} --global-batch-size 120 --device_type {device}".split()
    config = parse(argv)
    plan = make_plan(*plan_config(config))
    assert plan.layout.world_size == world
    assert search_command(plan, config, argv) == f"{starts} {SMALL} --global-batch-size 120"


def test_a_search_finds_layouts_for_a_batch_that_replicas_cannot_share_equally() -> None:
    config = parse(f"{SEARCH} --plan-search --world-size 7 --device-type a100-80gb --global-batch-size 9".split())
    found = list(candidates(config, 7, load_device("a100-80gb")))
    assert {(c.tp, c.pp, c.micro_batch) for c in found} == {(1, 1, 1), (1, 1, 2)}
    for c in found:
        assert resolve(c.apply(config), 7, 0, declare)[0].micro_batches(7) == 2 // c.micro_batch
    with pytest.raises(ValueError, match="no layout gives every data-parallel rank a sample; use 7"):
        Search(replace(config, training=replace(config.training, global_batch_size=6)), load_device("a100-80gb"), 0)


def test_a_search_needs_a_batch() -> None:
    argv = [*SMALL.split(), *"--plan-search --world-size 8 --device-type a100-80gb".split()]
    with pytest.raises(ValueError, match="--plan-search needs --global-batch-size"):
        run_search(parse(argv), argv, Console())


def test_updates_of_whole_matrices_by_hand() -> None:
    """Six iterations of 2 (2 m m n + m^3) FLOPs at 1 TFLOP/s, m <= n, of the tp rank's part where Gram matrices are
    summed; each of four ranks has a quarter, and the busiest as much more as its matrices cost.

    GPT-2's of 64: queries, keys, values and the projection of 64 x 64, up and down of 64 x 256; on two tp ranks.
    """
    flags = f"{SMALL} --zero-stage 1 --optimizer muon --muon-num-ns-steps 6 --tensor-model-parallel-size 2"
    config, layout = resolve(parse(flags.split()), 8, 0, declare)
    spec = rank_spec(config, layout, 0, declare)
    muon, one = StepCosts(config, layout, spec, simple()), Layout(dp=4, tp=2)
    assert layout == one
    h, f = config.model.hidden_size, config.model.ffn_size
    flops = sum(
        count * 6 * (4 * h * h * part + 2 * h**3) for count, part in ((4, h // 2), (2, f // 2))
    )  # of all ranks of a block
    gram, number = Moved("tp", "all-reduce", 4 * h * h), Moved("tp", "all-reduce", 4)
    assert Counter(muon.sizes.moves(Update("blocks.1"))) == {gram: 6 * 6, number: 6}
    sent = sum(muon.network.collective("tp", "all-reduce", each.num_bytes) for each in [gram] * 36 + [number] * 6)
    bytes_moved = updated_bytes(muon.sizes.optimized("blocks.1")) / 1e12
    uneven = update_imbalance(spec)
    assert muon(Update("blocks.1")) == pytest.approx((flops / 1e12 + sent) / 4 * uneven + bytes_moved)
    costs = [sum(unit.flat.cost(unit.owned[rank]) for unit in spec.units.values()) for rank in range(4)]
    assert uneven == pytest.approx(max(costs) / (sum(costs) / 4)) and uneven > 1


@for_each(("more", "bandwidth"), [("", 1e12), ("--optimizer-cpu-offload", 1e10)])
@for_each(("dtype", "gradient"), [("fp32", 4), ("bf16", 2)])
def test_bytes_that_an_update_moves_in_memory_by_hand(dtype: str, gradient: int, more: str, bandwidth: float) -> None:
    """A reduced part is read with its sum, which is written; the norm reads gradients; an update moves
    the bytes of its states. Host memory has 10 GB/s.
    """
    flags = f"{SMALL} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --zero-stage 2 {more}"
    flags += f" --precision {dtype} --grad-dtype {dtype} --global-batch-size 12"
    config, layout = resolve(parse(flags.split()), 24, 0, declare)
    spec = rank_spec(config, layout, 1, declare)
    costs, owned = StepCosts(config, layout, spec, simple()), spec.units["blocks.2"].numel // 3
    sent = costs.network.one_pass("shard", 3 * owned * gradient)
    assert costs(Reduce("blocks.2")) == pytest.approx(sent + 3 * owned * gradient / 1e12)
    agreed = costs._moving((*costs.sizes.agreed(), *costs.sizes.moves(GradNorm())))
    assert costs(GradNorm()) - agreed == pytest.approx(2 * owned * gradient / bandwidth)
    assert costs(Update("blocks.2")) == pytest.approx(updated_bytes(costs.sizes.optimized("blocks.2")) / bandwidth)


@for_each("optimizer", ["adamw", "muon"])
def test_the_cost_of_matrices_is_added_up_once(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at all for an optimizer that cuts them, whose ranks are even; else once per matrix, however many ranks."""
    flags = f"{SMALL} --optimizer {optimizer} --zero-stage 1 --num-experts 64 --architecture llama"
    config, layout = resolve(parse(flags.split()), 32, 0, declare)
    asked: list[Matrices] = []
    cost = Matrices.cost.fget
    monkeypatch.setattr(Matrices, "cost", property(lambda matrices: asked.append(matrices) or cost(matrices)))
    spec = rank_spec(config, layout, 0, declare)
    uneven, flats = update_imbalance(spec), {id(unit.flat): unit.flat for unit in spec.units.values()}
    matrices = sum(piece.matrices is not None for flat in flats.values() for piece in flat.pieces)
    assert matrices > 100 and layout.dp == 32
    assert (uneven > 1, len(asked)) == ((True, matrices) if optimizer == "muon" else (False, 0))


@for_each("micro_batches", [23, 24])
def test_a_long_schedule_takes_as_long_as_two_short_ones_say(micro_batches: int) -> None:
    """Exactly, if all layers are equal: also where the first group of an interleaved schedule is short."""
    flags = "--num-layers 6 --pipeline-model-parallel-size 3 --pipeline-schedule interleaved --micro-batch-size 1"
    flags = f"{SMALL} {flags} --virtual-pipeline-stages 2 --global-batch-size {micro_batches}"
    config, layout = resolve(parse(flags.split()), 3, 0, declare)
    specs, few = (
        [rank_spec(config, layout, pp, declare) for pp in range(3)],
        Few.of("interleaved", layout, micro_batches),
    )

    def seconds(count: int) -> float:
        steps = [program(spec, "interleaved", count).gradients for spec in specs]
        return simulate(steps, lambda op: {Forward: 1.0, Backward: 3.0}.get(type(op), 0.0)).seconds

    assert len(few.counts) == 2 and max(few.counts) < micro_batches
    assert few.extend([seconds(count) for count in few.counts]) == seconds(micro_batches)


@for_each("schedule", ["1f1b", "interleaved --virtual-pipeline-stages 2"])
@for_each(("pp", "stage"), [(2, 0), (2, 1), (4, 0), (4, 1)])
def test_a_stage_of_many_micro_batches_holds_as_much_as_the_whole_step(pp: int, stage: int, schedule: str) -> None:
    """Every number, if as many micro-batches as stages divide the step and if they do not."""
    for micro_batches in (5 * pp, 6 * pp + (pp - 1) * (schedule == "1f1b")):
        flags = f"--num-layers 8 --pipeline-model-parallel-size {pp} --pipeline-schedule {schedule} --zero-stage 2"
        flags = f"{SMALL} {flags} --micro-batch-size 1 --global-batch-size {2 * micro_batches}"
        config, layout = resolve(parse(flags.split()), 2 * pp, 0, declare)
        found = stage_bytes(config, layout, stage, "cuda")
        with mock.patch.object(Few, "of", lambda schedule, layout, wanted: Few(wanted, (wanted,))):
            assert found == stage_bytes.__wrapped__(config, layout, stage, "cuda")
