"""The numbers of a plan, each in its own place: tables, lines, plan.json and the table of a search agree.

One plan has a different number everywhere.
"""

import io
import re

import pytest
from rich.console import Console

from megazero.engine.model.stage import declare
from megazero.flags.cli import parse
from megazero.flags.config import Config
from megazero.flags.flag_names import with_values
from megazero.flags.resolve import resolve
from megazero.planner import run_plan
from megazero.planner.bytes.capacity import checkpoint_bytes
from megazero.planner.bytes.estimate import KINDS, StageBytes
from megazero.planner.expected import Reached
from megazero.planner.goodput import ways
from megazero.planner.plan_report import show, summary
from megazero.planner.run_plan import Plan, advice, as_json
from megazero.planner.search.search_report import COLUMNS, _row
from megazero.planner.time.devices import load_device
from megazero.planner.time.step_time import PARTS, Parts, StepTime
from megazero.planner.trace.trace import model_flops
from megazero.units import count
from tests.helpers.table import for_each

GB = 10**9
TRAFFIC = ("dp", "cp", "ep", "tp", "pp", "control", "pcie", "nvme")
FLAGS = (
    "--architecture mixtral --num-experts 10 --num-layers 6 --hidden-size 32 --num-attention-heads 8 --seq-length 40 "
    "--vocab-size 100 --precision bf16 --tensor-model-parallel-size 4 --context-parallel-size 2 "
    "--pipeline-model-parallel-size 3 --virtual-pipeline-stages 2 --pipeline-schedule interleaved "
    "--expert-model-parallel-size 5 "
    "--expert-tensor-parallel-size 2 --sequence-parallel --micro-batch-size 7 --global-batch-size 210 --train-iters 11 "
    "--zero-stage 1 --recompute selective"
)


def plan_of(flags: str = FLAGS, world: int = 120) -> Plan:
    """Return a plan of 3 stages with made-up bytes: the middle one is the fullest, and the last the busiest."""
    config, layout = resolve(parse(flags.split()), world, 0, declare)
    stages = []
    for stage in range(3):
        at_peak = {kind: (1 + n + 10 * (2 * stage % 3)) * GB // 8 for n, kind in enumerate(KINDS)}
        memory = {"parameters": 2 + stage, "host": (5 + 3 * stage % 5) * GB, "nvme": (11 + 4 * stage % 7) * GB}
        traffic = {axis: (n + 1 + 20 * stage) * GB // 4 for n, axis in enumerate(TRAFFIC)}
        stages.append(StageBytes(memory, traffic, 70 + stage, 0, sum(at_peak.values()), at_peak, 0, (0, 0), 0))
    seconds = {part: 1.0 + n * (n + 1) / 4 for n, part in enumerate(PARTS)}
    parts = Parts(sum(seconds.values()), seconds, (1.0, 2.0, 3.0), 2)
    return Plan(config, layout, load_device("h100-80gb"), stages, StepTime(parts, 97.0, 173.0))


def parameters(config: Config) -> tuple[int, int]:
    """Return the number of all parameters of the model of `FLAGS`, by hand, and of those that a token passes."""
    h, f, v, experts, active = 32, config.model.ffn_hidden_size, config.model.vocab_size, 10, 2
    rest = 2 * v * h + h + 6 * (4 * h * h + 2 * h + experts * h)
    return rest + 6 * experts * 3 * h * f, rest + 6 * active * 3 * h * f


def tables(text: str) -> list[dict[str, dict[str, str]]]:
    """Return the printed tables: by the first cell of a row, its other cells by heading."""
    found: list[dict[str, dict[str, str]]] = []
    names: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split("[│┃]", line)[1:-1]]
        if line.startswith("┃"):
            names = cells
            found.append({})
        elif line.startswith("│"):
            found[-1][cells[0]] = dict(zip(names[1:], cells[1:], strict=True))
    return found


def printed(plan: Plan) -> str:
    console = Console(file=io.StringIO(), width=200)
    show(plan, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_table_has_each_number_under_its_heading() -> None:
    plan = plan_of()
    text = printed(plan)
    memory, traffic, seconds = tables(text)
    usable = plan.device["memory.capacity"] - plan.device.reserved_bytes(plan.layout)
    for number, stage in enumerate(plan.stages):
        wanted = {kind.replace("_", " "): f"{stage.at_peak[kind] / GB:.2f}" for kind in KINDS}
        free = (usable - stage.peak) / GB
        assert memory[str(number)] == wanted | {"peak": f"{stage.peak / GB:.2f}", "free": f"{free:.2f}"}
        assert traffic[str(number)] == {axis: f"{stage.traffic[axis] / GB:.3f}" for axis in TRAFFIC}
    whole = sum(plan.time.expected.parts.values())
    assert list(seconds.values()) == [
        *(
            {"seconds": f"{1 + n * (n + 1) / 4:.4g}", "share": f"{(1 + n * (n + 1) / 4) / whole:.1%}"}
            for n in range(11)
        ),
        {"seconds": f"{whole:.4g}", "share": ""},
    ]
    words = (
        "compute",
        "recompute",
        "norm",
        "tensor",
        "keys",
        "tokens",
        "data",
        "messages",
        "host",
        "stages",
        "kept",
        "step",
    )
    assert all(word in name for word, name in zip(words, seconds, strict=True))
    assert "seconds of a step on stage 2, the busiest" in text
    assert text.startswith("0.00 B parameters on 120 x h100-80gb: ")
    whole, active = parameters(plan.config)
    experts = f"experts: 10 in each of 6 layers, 2 active per token: {count(whole)} parameters, {count(active)} active"
    assert f"{experts} per token\n" in text
    assert "120 x h100-80gb: pp 3 (2 virtual stages each) x dp 5 x cp 2 x tp 4, ep 5 x etp 2, " in text
    assert ", 6 micro-batches of 7\n" in text


def test_plan_json_has_the_numbers_of_the_tables() -> None:
    plan = plan_of()
    found, layout, config = as_json(plan), plan.layout, plan.config
    assert found["layout"] == {
        "pp": 3, "dp": 5, "cp": 2, "tp": 4, "ep": 5, "etp": 2, "shard": 10, "chunks": 2,
    }  # fmt: skip
    assert (found["world_size"], found["device_type"], found["fits"]) == (120, "h100-80gb", True)
    assert (found["parameters"], found["active_parameters"]) == parameters(config)
    assert found["device_bytes"] == 85 * GB and found["reserved_bytes"] == plan.device.reserved_bytes(layout) != 0
    assert [stage["layers"] for stage in found["stages"]] == [[0, 3], [1, 4], [2, 5]]
    for number, (shown, stage) in enumerate(zip(found["stages"], plan.stages, strict=True)):
        assert shown == {
            "stage": number,
            "layers": shown["layers"],
            "memory_bytes": stage.memory,
            "traffic_bytes": stage.traffic,
            "activation_bytes": 70 + number,
            "peak_bytes": stage.peak,
            "free_bytes": 85 * GB - found["reserved_bytes"] - stage.peak,
            "at_peak": stage.at_peak,
        }
    seconds = found["step_seconds"]
    assert seconds == plan.time.expected.seconds and found["step_seconds_range"] == [97.0, 173.0]
    assert found["step_parts"] == plan.time.expected.parts
    flops = model_flops(config.model, 210) / seconds / 120
    assert found["tflops_per_device"] == pytest.approx(flops / 1e12)
    assert found["mfu"] == pytest.approx(flops / plan.device["compute.bf16"])
    assert found["tokens_per_second"] == pytest.approx(210 * 40 / seconds)
    assert found["days"] == pytest.approx(11 * seconds / 86_400)
    share = plan.reached
    assert share is not None and share.least < share.median < share.most
    for name in ("tflops_per_device", "mfu", "tokens_per_second"):
        assert found["expected"][name] == found[name] * share.median
        assert found["expected"][f"{name}_range"] == (found[name] * share.least, found[name] * share.most)
    for name in ("step_seconds", "days"):
        assert found["expected"][name] == found[name] / share.median
        assert found["expected"][f"{name}_range"] == (found[name] / share.most, found[name] / share.least)
    line = printed(plan).splitlines()[1]
    speed, mfu = found["expected"], found["expected"]["mfu_range"]
    each = [speed["tokens_per_second"], *speed["tokens_per_second_range"]]
    assert re.findall(r"[\d.,]*\d", line) == [
        *(f"{value / 120:,.0f}" for value in each),
        *(f"{100 * value:.1f}" for value in (speed["mfu"], *mfu)),
    ]
    failing = plan._replace(config=with_values(config, {"mtbf": 500.0}))
    wanted = [way._asdict() for way in ways(config, plan.device, 120, 500.0)]
    assert as_json(failing)["failures"] == wanted != [] == found["failures"]


@for_each(
    ("more", "held"),
    [
        ("--optimizer-cpu-offload", "optimizer states and gradients"),
        ("--recompute full --checkpoint-in-cpu", "inputs kept for recompute"),
        ("--memory-checkpoint-interval 3 --memory-checkpoint-dir m --save s", "checkpoints on their way to memory"),
    ],
)
def test_memory_of_hosts_is_that_of_a_nodes_devices(more: str, held: str) -> None:
    """The fullest stage has 8 GB a device in host memory and 15 GB in files; each of 15 nodes has 8 devices."""
    plan = plan_of(f"{FLAGS} {more}")
    lines = summary(plan)
    assert f"host memory: 64.0 GB per node for {held}" in lines
    assert "files: 120.0 GB per node in --optimizer-nvme-offload" in lines
    kept = f"checkpoints in memory: {checkpoint_bytes(plan.config) * 4 // 15 / GB:.1f} GB per node in"
    assert any(line.startswith(kept) for line in lines) == ("memory-checkpoint" in more)
    reserved = plan.device.reserved_bytes(plan.layout)
    free = 85 * GB - reserved - plan.stages[1].peak
    (line,) = (line for line in lines if line.startswith("memory: "))
    assert line.startswith(f"memory: 85.0 GB per device, {reserved / GB:.1f} GB of them reserved for libraries (")
    assert line.endswith(f"NCCL communicators); {free / GB:.1f} GB free on the fullest device")


@for_each(
    ("iterations", "length"),
    [
        (288, "12.0 minutes expected (10.0 to 15.0)"),
        (14_400, "10.0 hours expected (8.3 to 12.5)"),
        (360_000, "10.4 days expected (8.7 to 13.0)"),
    ],
)
def test_a_run_lasts_as_long_as_its_steps_at_the_speed_of_published_runs(
    iterations: int, length: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 2 s, 8,400 tokens; published runs reached 80 %, 64 to 96 %, of their plans."""
    monkeypatch.setattr(run_plan, "reached", lambda: Reached(0.8, 0.64, 0.96, 7))
    plan = plan_of()
    time = plan.time._replace(expected=plan.time.expected._replace(seconds=2.0))
    plan = plan._replace(time=time, config=with_values(plan.config, {"train-iters": iterations}))
    tokens = iterations * 8400 / GB
    assert f"--train-iters {iterations}: {tokens:.2f} B tokens, {length}" in summary(plan)
    speed, words = printed(plan).splitlines()[1:3]
    assert speed.startswith("expected: 28 tokens/s per device (22 to 34), MFU ")
    assert words.startswith("7 published runs without experts reached 64% to 96% of their planned speed, 80% in the")


def test_limits_have_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages take 70 s of 200 s, and recompute 40 s; with less of it, the fullest stage holds 23 or 99 GB.

    A part of less than 5e-5 of a step is in no table.
    """
    flags = FLAGS.replace("--recompute selective", "--recompute full").replace("bf16", "fp32")
    plan, seconds = (
        plan_of(flags),
        dict.fromkeys(PARTS, 0.0) | {"compute": 90.0, "recompute": 40.0, "pp": 70.0, "tp": 0.009},
    )
    parts = plan.time.expected._replace(seconds=200.0, parts=seconds)
    plan = plan._replace(time=plan.time._replace(expected=parts), device=load_device("a100-80gb"))
    held = {"none": 99 * GB, "selective": 23 * GB}
    monkeypatch.setattr(run_plan, "_peak", lambda plan, config: held[config.activations.recompute])
    slow, room = advice(plan)
    assert [row["seconds"] for row in tables(printed(plan))[2].values()] == ["90", "40", "70", "200"]
    assert slow.startswith("pp takes 35% of a step; to shorten it: a smaller --pipeline-model-parallel-size; fewer --v")
    assert room == "--recompute selective fits too (23.0 GB per device), and saves up to 40.00 s a step"
    stages = [stage._replace(peak=stage.peak + 70 * GB) for stage in plan.stages]
    full = plan._replace(stages=stages)
    monkeypatch.setattr(run_plan, "_what_fits", lambda plan: "a way out")
    lacks = stages[1].peak - 85 * GB + plan.device.reserved_bytes(plan.layout)
    assert list(advice(full)) == [f"out of memory: a device of stage 1 lacks {lacks / GB:.1f} GB; a way out"]
    assert lacks > 0 and full.free == -lacks and not as_json(full)["fits"] and as_json(full)["expected"] is None
    assert "DOES NOT FIT" in printed(full) and "seconds of a step" not in printed(full)


def test_the_row_of_a_search_has_each_number_under_its_heading() -> None:
    plan = plan_of()
    parts, seconds = plan.time.expected.parts, plan.seconds
    assert dict(zip(COLUMNS.split(", "), _row(plan), strict=True)) == {
        "step s": f"{seconds:.4g}",
        "TFLOP/s": f"{plan.tflops:.1f}",
        "expected": f"{plan.tflops * plan.reached.median:.0f}",  # type: ignore[union-attr]
        "GB": "21.0",
        "tp": "4",
        "cp": "2",
        "pp": "3",
        "virtual": "2",
        "schedule": "interleaved",
        "dp": "5",
        "ZeRO": "1",
        "shard": "10",
        "recompute": "selective",
        "SP": "yes",
        "Pa": "",
        "micro": "7",
        "bubble": f"{parts['bubble'] / seconds:.1%}",
        "dp wait": f"{parts['dp'] / seconds:.1%}",
    }
    changed = with_values(plan.config, {"sequence-parallel": False, "partition-activations": True})
    assert _row(plan._replace(config=changed))[13:15] == ["", "yes"]
