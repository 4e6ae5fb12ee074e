"""Layouts that small runs never have: more than eight stages, several nodes, copies without tensor parallelism."""

import functools
import io
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from megazero.command.rehearsal.rehearsal_report import rehearsed_ranks
from megazero.data.corpora import mock_datasets
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.plan.program.operations import Backward, Forward, Recv
from megazero.flags.cli import parse
from megazero.flags.config import Config
from megazero.flags.flag_names import with_values
from megazero.flags.resolve import resolve
from megazero.host import Available, Machine
from megazero.observe.bubble import StageTimes, bubble
from megazero.observe.events import software
from megazero.observe.start_report import _memory, details, drawing
from megazero.observe.stragglers import report_slow, slow_ranks
from megazero.observe.timeline import Interval
from megazero.planner.bytes.capacity import check_memory, checkpoint_bytes, estimated, least
from megazero.planner.bytes.estimate import KINDS, StageBytes, estimate, stage_bytes
from megazero.planner.goodput import ways
from megazero.planner.plan_report import expected_lines, show, show_failures, summary
from megazero.planner.run_plan import Plan
from megazero.planner.search.choose import _words
from megazero.planner.search.search_report import COLUMNS, _row, search_command
from megazero.planner.time.devices import load_device
from megazero.planner.time.network import GroupNodes, Network, ranks_of_axis
from megazero.planner.time.step_time import PARTS, Parts, StepTime
from megazero.planner.trace.pretend import pretend_mesh
from megazero.planner.trace.trace import model_flops
from megazero.run.trainer import Trainer
from megazero.units import duration, size
from scripts.draw_schedule import plain_pipeline
from tests.helpers.table import for_each

MODEL = "--hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 100"
STAGES = f"--num-layers 12 {MODEL} --pipeline-model-parallel-size 12 --pipeline-split 1,1,1,1,1,1,1,1,1,1,1,1"


@functools.cache
def resolved(flags: str, world: int) -> tuple[Config, Layout]:
    return resolve(parse(flags.split()), world, 0, declare)


# -- more than eight stages


def made_plan(peaks: list[int], world: int, host: int = 0) -> Plan:
    """A plan whose stages hold at most that many GB."""
    kept = "--recompute full --checkpoint-in-cpu" if host else ""
    config, layout = resolved(f"{STAGES} --global-batch-size {world} {kept}", world)
    stages = [
        StageBytes(
            {"host": host * 10**9, "nvme": 0},
            {"dp": 10**9 * stage, "pp": 10**9},
            0,
            0,
            10**9 * peak,
            dict.fromkeys(KINDS, 0) | {"parameters": 10**9 * peak},
            0,
            (0, 0),
            0,
        )
        for stage, peak in enumerate(peaks)
    ]
    parts = Parts(2.0, dict.fromkeys(PARTS, 0.0) | {"compute": 2.0}, (2.0,) * 12, 7)
    return Plan(config, layout, load_device("h100-80gb"), stages, StepTime(parts, 1.0, 3.0))


def test_a_table_of_many_stages_has_both_ends_the_middle_and_the_fullest() -> None:
    plan = made_plan([9, 8, 7, 7, 30, 7, 7, 7, 7, 7, 8, 9], 12)
    assert plan.fullest == 4
    console = Console(file=io.StringIO(), width=160)
    show(plan, console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    rows = [line.replace("│", " ").split() for line in lines if line.startswith("│") and line[1:8].strip().isdigit()]
    memory, traffic = rows[:7], rows[7:]
    assert [int(row[0]) for row in memory] == [int(row[0]) for row in traffic] == [0, 1, 2, 4, 6, 10, 11]
    assert [float(row[-2]) for row in memory] == [9, 8, 7, 30, 7, 8, 9]
    usable = plan.usable / 1e9
    assert [float(row[-1]) for row in memory] == pytest.approx([usable - float(row[-2]) for row in memory], abs=0.006)
    assert [row[1] for row in traffic[1:]] == ["1.000", "2.000", "4.000", "6.000", "10.000", "11.000"]
    assert any("(12 stages; the others are between these)" in line for line in lines)
    assert any("seconds of a step on stage 7" in line for line in lines)


@for_each(("world", "devices"), [(12, 6), (24, 8)])
def test_host_memory_of_a_node_is_that_of_its_devices(world: int, devices: int) -> None:
    """3 GB each, of eight devices on a node; twelve devices are on two nodes, a plan of four devices has four."""
    assert f"host memory: {3 * devices}.0 GB per node for inputs kept for recompute" in summary(
        made_plan([9] * 12, world, host=3)
    )
    few = made_plan([9] * 12, 12, host=3)
    few = few._replace(
        layout=Layout(dp=4), config=resolved(f"--num-layers 2 --recompute full --checkpoint-in-cpu {MODEL}", 4)[0]
    )
    assert "host memory: 12.0 GB per node for inputs kept for recompute" in summary(few)


def test_a_drawing_of_twelve_stages() -> None:
    config, layout = resolved(f"{STAGES} --zero-stage 2", 36)
    assert drawing(config, layout) == [
        "12 pipeline stages x 3 data-parallel = 36 ranks; ZeRO stage 2: optimizer states and gradients sharded over 3 "
        "data-parallel ranks",
        "stage 0: token table, layers 0: ranks 0-2",
        "stage 1: layers 1: ranks 3-5",
        "stage 2: layers 2: ranks 6-8",
        "...",
        "stage 11: layers 11, head: ranks 33-35",
    ]


def test_a_drawing_of_many_copies() -> None:
    """Ranks in brackets share a copy; of many, the first ones and the last."""
    config = parse([*f"--num-layers 12 {MODEL}".split()])
    assert drawing(config, Layout(dp=10, tp=2))[1:] == [
        "ranks [0-1] [2-3] [4-5] ... [18-19]: each [ ] one copy of the model"
    ]
    assert drawing(config, Layout(dp=9))[1:] == ["ranks 0-8: each a copy of the model"]


def test_logits_are_held_where_the_last_stage_is() -> None:
    """The last rank of a pipeline; of a V the first."""
    flags = f"--num-layers 8 {MODEL} --pipeline-model-parallel-size 4 --micro-batch-size 64"
    v = "--pipeline-schedule zero-bubble-v --virtual-pipeline-stages 2"
    for extra, wanted in (("", [0, 0, 0, 1]), (v, [1, 0, 0, 0])):
        config, layout = resolved(f"{flags} {extra}", 4)
        found = [least(config, layout, pp).device["logits"] for pp in range(4)]
        assert found == [64 * 8 * 100 * 4 * here for here in wanted]


def test_a_pipeline_of_twelve_stages() -> None:
    """Its links are a row, or of a V two; the last stage of a V is on the first rank."""
    row, v = Layout(pp=12, dp=2), Layout(pp=12, dp=2, chunks=2, v_shaped=True)
    down = {(first, 1, 0) for first in range(11)} | {(first, -1, 0) for first in range(11)}
    back = {(first, -1, 1) for first in range(11)} | {(first, 1, 1) for first in range(11)}
    assert set(row.links()) == down and set(v.links()) == down | back
    assert (row.last_pp, v.last_pp) == (11, 0)
    assert row.groups("embedding") == [[0, 22], [1, 23]] and v.groups("embedding") == [[0], [1]]
    assert [spec.stages for spec in plain_pipeline(12, 2, v_shaped=True)] == [[r, 23 - r] for r in range(12)]
    assert rehearsed_ranks("24:stages", row) == [*range(0, 24, 2)]
    times = [StageTimes(10.0, 1.0, 11.0 + stage) for stage in range(12)]
    times[9] = StageTimes(12.0, 2.0, 14.0)
    assert bubble(times) == pytest.approx((2 + 22 - 14) / 12)  # it waits 2, and 8 for the stage that ends last


# -- several nodes


def test_hosts_of_several_nodes_are_named_with_their_ranks() -> None:
    config, layout = resolved(f"--num-layers 2 {MODEL}", 7)
    node = Machine(range(0, 3), "cpu", None, Available(10**10, "of host memory"))
    text = details(config, layout, node, ["a", "a", "a", "b", "b", "b", "c"], {}, "", "")
    assert "hosts\n  a: ranks 0-2\n  b: ranks 3-5\n  c: ranks 6\n" in text
    mesh = pretend_mesh(layout, 0, torch.device("cpu"), True)
    mesh.world.hosts = ["a", "a", "a", "b", "b", "b", "c"]
    assert software(mesh)["hosts"] == ["a", "b", "c"] and software(mesh)["ranks"] == 7


@for_each(
    ("ranks", "stages"),
    [(range(0, 4), [0, 0, 0, 0]), (range(4, 8), [1, 1, 1, 1]), (range(2, 6), [0, 0, 1, 1]), (range(6, 8), [1, 1])],
)
def test_a_node_needs_what_its_own_ranks_need(ranks: range, stages: list[int]) -> None:
    """Two stages of four ranks, on nodes of four: the second stage has the head, and other weights."""
    config, layout = resolved(f"--num-layers 3 --pipeline-split 2,1 {MODEL} --pipeline-model-parallel-size 2", 8)
    of_stage = [estimated(config, layout, stage, "cpu").total for stage in (0, 1)]
    bounds = [least(config, layout, stage).total for stage in (0, 1)]
    assert of_stage[0] != of_stage[1] and bounds[0] != bounds[1]
    need = sum(of_stage[stage] for stage in stages)
    check_memory(config, layout, ranks[0], Machine(ranks, "cpu", None, Available(need, "of host memory")))
    with pytest.raises(ValueError, match=rf"the {len(ranks)} ranks of this node {size(need)}, and "):
        check_memory(config, layout, ranks[0], Machine(ranks, "cpu", None, Available(need - 1, "of host memory")))
    peaks = [stage_bytes(config, layout, pp, "cpu").peak for pp in (0, 1)]
    shown = _memory(config, layout, Machine(ranks, "cpu", None, Available(10**10, "of host memory")))
    assert f", {size(max(peaks) * len(ranks))} for this node's {len(ranks)} of the 10.0 GB of host memory" in shown


@for_each(
    ("group", "wanted"),
    [
        # (ranks, stride, devices of a node): nodes, ranks in a node, groups that leave a node
        ((8, 1, 8), GroupNodes(8, 1, 8, 1)),
        ((16, 1, 8), GroupNodes(16, 2, 8, 1)),
        ((2, 8, 8), GroupNodes(2, 2, 1, 8)),
        ((4, 4, 8), GroupNodes(4, 2, 2, 4)),
        ((3, 4, 8), GroupNodes(3, 2, 2, 4)),
        ((2, 24, 8), GroupNodes(2, 2, 1, 8)),
    ],
)
def test_a_group_lies_on_these_nodes(group: tuple[int, int, int], wanted: GroupNodes) -> None:
    assert ranks_of_axis(*group) == wanted


def test_groups_of_every_axis_lie_on_these_nodes() -> None:
    """Nodes of eight: 8 stages of two copies, in two shards of one; 2 stages of 16 copies, in 4 shards of 4."""
    device = load_device("h100-80gb")
    assert Network(device, Layout(pp=8, dp=2, shards=1)).groups == {
        "tp": GroupNodes(1, 1, 1, 8),
        "shard": GroupNodes(1, 1, 1, 8),
        "replica": GroupNodes(2, 1, 2, 4),
        "dp": GroupNodes(2, 1, 2, 4),
        "cp": GroupNodes(1, 1, 1, 8),
        "data": GroupNodes(2, 1, 2, 4),
        "pp": GroupNodes(8, 2, 4, 2),
        "embedding": GroupNodes(2, 2, 1, 8),  # ranks 0 and 14
        "etp": GroupNodes(1, 1, 1, 8),
        "ep": GroupNodes(1, 1, 1, 8),
        "expert_shard": GroupNodes(1, 1, 1, 8),
        "expert_replica": GroupNodes(2, 1, 2, 4),
    }
    assert Network(device, Layout(pp=2, dp=16, shards=4)).groups == {
        "tp": GroupNodes(1, 1, 1, 8),
        "shard": GroupNodes(4, 1, 4, 2),
        "replica": GroupNodes(4, 2, 2, 4),
        "dp": GroupNodes(16, 2, 8, 1),
        "cp": GroupNodes(1, 1, 1, 8),
        "data": GroupNodes(16, 2, 8, 1),
        "pp": GroupNodes(2, 2, 1, 8),
        "embedding": GroupNodes(2, 2, 1, 8),
        "etp": GroupNodes(1, 1, 1, 8),
        "ep": GroupNodes(1, 1, 1, 8),
        "expert_shard": GroupNodes(4, 1, 4, 2),
        "expert_replica": GroupNodes(4, 2, 2, 4),
    }
    groups = Network(device, Layout(dp=2, cp=8, tp=2)).groups  # a rank of cp is two nodes away from the last
    assert groups["cp"] == GroupNodes(8, 2, 4, 2) and groups["data"] == GroupNodes(16, 4, 4, 2)
    v = Layout(pp=2, dp=16, chunks=2, v_shaped=True)
    assert Network(device, v).groups["embedding"] == GroupNodes(1, 1, 1, 8)


def test_ranks_of_racks_are_shared_out_equally() -> None:
    """256 ranks in NVLink domains of 72: 64 in each of four, so that experts of 64 ranks do not leave theirs."""
    groups = Network(load_device("gb200"), Layout(pp=4, dp=64, ep=64)).groups
    assert groups["ep"] == groups["dp"] == GroupNodes(64, 1, 64, 1) and groups["pp"] == GroupNodes(4, 4, 1, 64)
    assert Network(load_device("h100-80gb"), Layout(dp=12)).groups["dp"] == GroupNodes(12, 2, 6, 1)
    plan = made_plan([9] * 12, 24, host=3)._replace(device=load_device("gb200"))
    assert "host memory: 12.0 GB per node for inputs kept for recompute" in summary(plan)  # of one tray of four


def test_devices_without_a_switch_have_one_link_to_each_other() -> None:
    """MI300X: 7 links of 64 GB/s in one direction, of which 0.7 are reached."""
    for tp, links in ((2, 1), (4, 3), (8, 7)):
        network = Network(load_device("mi300x"), Layout(pp=8 // tp, tp=tp))
        assert network.bandwidth(network.groups["tp"]) == pytest.approx(0.7 * 64e9 * links)
        latency = network.inside[1]
        assert tp == 8 or network.message(1e9, 0, 1) == pytest.approx(latency + 1 / (0.7 * 64))
    network = Network(load_device("h100-80gb"), Layout(dp=4, tp=2))
    assert network.bandwidth(network.groups["tp"]) == network.bandwidth(network.groups["data"]) == network.inside[0]


def test_messages_between_stages_share_a_nodes_cards() -> None:
    """H100: 8 devices a node. Stages of 16 ranks leave a node with 8 messages at once, of 2 ranks with 2."""
    device = load_device("h100-80gb")
    for layout, nodes in ((Layout(pp=4, dp=16), 8), (Layout(pp=16, dp=2), 2), (Layout(pp=4, cp=2, tp=2), 4)):
        network = Network(device, layout)
        (between, latency), each = network.between, device.devices_per_node
        leaving = each // nodes  # the first message that crosses: stage 3 to 4, or 0 to 1
        sender = leaving - 1
        assert network.message(1e9, sender, sender + 1) == pytest.approx(
            latency + 1e9 / min(network.inside[0], between / nodes)
        )


def test_a_job_of_several_nodes_is_started_by_sbatch() -> None:
    plan = made_plan([9] * 12, 24)
    assert search_command(plan, plan.config, ["--plan", "--world-size", "24", "--lr", "1"]) == (
        "sbatch --nodes=3 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=8 scripts/slurm/pretrain.sbatch --lr 1"
    )
    plan = made_plan([9] * 12, 12)
    assert search_command(plan, plan.config, []).startswith("sbatch --nodes=2 ")


def test_planned_numbers_by_hand() -> None:
    """36 ranks, 2,400,000 samples of 8 tokens in 2 s; 1 to 3 s at the ends; 5,000 steps take 10,000 s."""
    plan = made_plan([9] * 12, 36)
    values = {"global-batch-size": 2_400_000, "train-iters": 5000}
    plan = plan._replace(config=with_values(plan.config, values))
    flops = model_flops(plan.config.model, 2_400_000)
    peak = plan.device[f"compute.{plan.config.training.precision}"]
    mfu = [flops / seconds / 36 / peak for seconds in (2, 3, 1)]
    step, speed, length = summary(plan)[:3]
    assert step.startswith("planned step: 2 s; 1 to 3 s with all constants of h100-80gb")
    assert speed == (
        f"planned speed: {flops / 2 / 36 / 1e12:.1f} TFLOP/s per device (recompute not counted), MFU {mfu[0]:.1%} "
        f"({mfu[1]:.1%} to {mfu[2]:.1%}), 829.44 B tokens a day"
    )
    hours = [f"{10_000 / 3600 / share:.1f}" for share in (plan.reached.median, plan.reached.most, plan.reached.least)]
    assert length == f"--train-iters 5000: 96.00 B tokens, {hours[0]} hours expected ({hours[1]} to {hours[2]})"
    each = [f"{2_400_000 * 8 / 2 / 36 * share:,.0f}" for share in plan.reached[:3]]
    assert expected_lines(plan)[0].startswith(f"expected: {each[0]} tokens/s per device ({each[1]} to {each[2]}), MFU ")
    assert plan.free == plan.usable - 9 * 10**9
    # 36 ranks are 6 on each of 6 nodes, which has two copies of its part and two of another's
    saved = plan._replace(config=with_values(plan.config, {"memory-checkpoint-interval": 7, "hidden-size": 160_000}))
    saved.stages[0].memory["host"] = 10**9
    kept = checkpoint_bytes(saved.config) * 4 / 6 / 1e9
    assert f"checkpoints in memory: {kept:.1f} GB per node in --memory-checkpoint-dir" in summary(saved)


def test_a_row_of_a_search_by_hand() -> None:
    """Each cell is in the column of its name, where no two axes are equal."""
    layout = Layout(pp=4, dp=8, tp=2, cp=3, shards=12, chunks=6, ep=12, expert_tp=1)
    plan = made_plan([9, 8, 7, 7, 30, 7, 7, 7, 7, 7, 8, 9], 12)
    config = with_values(
        plan.config, {"zero-stage": 3, "micro-batch-size": 7, "partition-activations": True, "global-batch-size": 112}
    )
    parts = plan.time.expected.parts | {"bubble": 0.5, "dp": 0.25}
    time = plan.time._replace(expected=plan.time.expected._replace(parts=parts))
    plan = plan._replace(config=config, layout=layout, time=time)
    cells = dict(zip(COLUMNS.split(", "), _row(plan), strict=True))
    sizes = {"tp": "2", "cp": "3", "pp": "4", "dp": "8", "virtual": "6", "micro": "7", "shard": "12", "ZeRO": "3"}
    shares = {"step s": "2", "GB": "30.0", "bubble": "25.0%", "dp wait": "12.5%", "Pa": "yes", "SP": ""}
    assert {name: cells[name] for name in (*sizes, *shares)} == sizes | shares
    assert _words(plan) == "pp 4 x dp 8 x cp 3 x tp 2 x ep 12, 1f1b, ZeRO stage 3, 2 micro-batches of 7"


def test_failures_of_jobs_of_each_size() -> None:
    """A row per number of devices, each with its own time between failures and its own ways to save."""
    plan = made_plan([9] * 12, 36)
    plan = plan._replace(config=with_values(plan.config, {"mtbf": 1000.0, "save": "x"}))
    console = Console(width=200, record=True, file=io.StringIO())
    show_failures(plan, console)
    text = console.export_text()
    rows = {cells[0]: cells[1:] for line in text.splitlines() if (cells := re.findall(r"[\d:,.%]+", line))}
    for devices in (36, 64, 1024, 16384):
        wanted = [word for way in ways(plan.config, plan.device, devices, 1000.0)
                  for word in (duration(way.interval), f"{way.goodput:.2%}")]  # fmt: skip
        assert rows[f"{devices:,}"] == [duration(3_600_000 / devices), *wanted], devices
    disk, memory = (max(1, round(way.interval / 2)) for way in ways(plan.config, plan.device, 36, 1000.0))
    assert f"--save-interval {disk}, or --memory-checkpoint-interval {memory} with rare saves" in text
    assert f"a checkpoint has {size(checkpoint_bytes(plan.config))}" in text


# -- dp > 1 without tensor parallelism


@for_each(
    ("peers", "wanted"),
    [
        # two stages of four: the median of each is its own
        (4, [(6, 2.0), (1, 1.5)]),
        (8, [(6, 8 / 3), (4, 4 / 3), (5, 4 / 3), (7, 4 / 3)]),  # one stage of eight: a median of 2.25
        (2, [(6, 4 / 3)]),
        (1, []),
    ],
)
def test_a_rank_is_slow_beside_those_of_its_stage(peers: int, wanted: list[tuple[int, float]]) -> None:
    """The slowest first."""
    seconds = [1.0, 1.5, 1.0, 1.0, 3.0, 3.0, 6.0, 3.0]
    found = slow_ranks(seconds, peers)
    assert [rank for rank, _ in found] == [rank for rank, _ in wanted]
    assert [times for _, times in found] == pytest.approx([times for _, times in wanted])


@for_each("layout", [Layout(pp=2, dp=3), Layout(pp=2, cp=3), Layout(pp=2, tp=3)])
def test_slow_ranks_are_reported_with_their_hosts(layout: Layout, capsys: pytest.CaptureFixture[str]) -> None:
    """Stages of three ranks compute 2, 5 and 2.5 s, and 8, 8.5 and 13.6 s; waits do not count."""
    others = torch.tensor([2.0, 0.0, 2.5, 8.0, 8.5, 13.6], dtype=torch.float64)
    host = SimpleNamespace(all_reduce_=lambda own, kind: own + others)
    world = SimpleNamespace(size=6, hosts=["a", "b", "c", "d", "e", "f"])
    mesh: Any = SimpleNamespace(rank=1, world=world, host=host, layout=layout)
    ops = (Forward("blocks.0", 0, True), 1, 4), (Recv("x", 0, 0), 4, 9), (Backward("blocks.0", 0), 9, 11)
    own = [Interval(op, begin * 10**9, end * 10**9) for op, begin, end in ops]
    assert report_slow(mesh, 31, own) == {
        "compute_seconds": [2.0, 6.5, 13.6],
        "slow_ranks": [{"rank": 1, "host": "b", "times": 2.0}, {"rank": 5, "host": "f", "times": 1.6}],
    }
    said = capsys.readouterr().out
    assert said == "iteration 31: SLOW: rank 1 (b) 2.0 x, rank 5 (f) 1.6 x the median computing time of their stage\n"


@for_each("flags", ["--zero-stage 0", "--zero-stage 1", "--zero-stage 3", "--zero-stage 2 --zero-shard-size 2"])
def test_bytes_of_a_stage_are_those_of_its_ranks(flags: str) -> None:
    """Every data-parallel rank has the same; a device that lacks a byte of it does not fit the run."""
    config, layout = resolved(f"{STAGES} {flags} --global-batch-size 8", 48)
    for pp in (0, 5, 11):
        found = stage_bytes(config, layout, pp, "cuda")
        for dp in (0, 3):
            wanted = estimate(config, layout, 4 * pp + dp, needs_staging_buffer=False)
            assert (found.memory, found.traffic) == (wanted.memory, wanted.traffic)
        need = estimated(config, layout, pp, "cuda").total
        host = Available(10**12, "of host memory")
        check_memory(config, layout, 4 * pp + 3, Machine(range(40, 48), "cuda", Available(need, "free"), host))
        with pytest.raises(ValueError, match="available to it"):
            check_memory(config, layout, 4 * pp + 3, Machine(range(40, 48), "cuda", Available(need - 1, "free"), host))


def test_a_record_counts_the_samples_of_all_copies_and_the_work_of_a_device() -> None:
    config, layout = resolved(f"--num-layers 2 {MODEL} --global-batch-size 24 --straggler-interval 0 --mock-data", 4)
    mesh = pretend_mesh(layout, 1, torch.device("cpu"), needs_staging_buffer=True)
    record = Trainer(config, mesh, mock_datasets(8, 1, 100), None).iterate()
    assert record["consumed_samples"] == 24
    assert record["tokens_per_second"] * record["step_seconds"] == pytest.approx(24 * 8)
    flops = record["tflops_per_device"] * 1e12 * 4 * record["step_seconds"]
    assert flops == pytest.approx(model_flops(config.model, 24))
    assert record["traffic_bytes"] == estimate(config, layout, 1).traffic
