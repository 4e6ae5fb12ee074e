"""`Plan`: predicted memory, traffic and time of a run on a cluster. docs/plan.md explains every number."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from megazero.data.remembered import data_tokenizer
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.plan.layout.zero_policy import offload_fraction
from megazero.engine.plan.program.rank_spec import rank_spec
from megazero.engine.plan.schedule.schedules import SCHEDULES
from megazero.flags.config import Config
from megazero.flags.flag_names import with_values
from megazero.flags.resolve import resolve
from megazero.flags.validate import check_device, check_values
from megazero.planner.bytes.capacity import allowed, flags_that_fit, largest_preset, least
from megazero.planner.bytes.estimate import StageBytes, stage_bytes
from megazero.planner.expected import Reached, reached
from megazero.planner.goodput import Way, ways
from megazero.planner.layouts import rank_layers
from megazero.planner.parameter_counts import active_parameters, num_parameters
from megazero.planner.time.devices import Device, load_device
from megazero.planner.time.exchange import choose_exchange
from megazero.planner.time.step_time import StepTime, step_time
from megazero.planner.trace.trace import model_flops

SECONDS_PER_DAY = 86_400
RECOMPUTE = ("none", "selective", "full")

Possible = Callable[[Config, Layout], bool]


def _always(config: Config, layout: Layout) -> bool:
    return True


# part of a step -> ways to shorten it, each with the condition under which it changes anything
ADVICE: dict[str, tuple[tuple[str, Possible], ...]] = {
    "recompute": (
        ("--recompute none, if there is memory for it", lambda c, _: c.activations.recompute == "selective"),
        ("--recompute selective, or none, if there is memory for it", lambda c, _: c.activations.recompute == "full"),
    ),
    "optimizer": (
        ("--zero-stage 1, which updates less per device", lambda c, layout: not c.zero.zero_stage and layout.data > 1),
        ("a larger --global-batch-size", _always),
        ("a smaller --optimizer-offload-fraction", lambda c, _: offload_fraction(c) > 0),
    ),
    "tp": (
        ("a smaller --tensor-model-parallel-size, within a node", _always),
        ("a larger --micro-batch-size", lambda c, layout: c.micro_batches(layout.dp) > 1),
        ("--sequence-parallel", lambda c, _: not c.parallel.sequence_parallel),
    ),
    "cp": (
        ("more tokens per rank (a smaller --context-parallel-size)", _always),
        ("context-parallel ranks within a node", _always),
    ),
    "ep": (
        ("a smaller --expert-model-parallel-size, its ranks within a node", _always),
        ("a shared expert, which hides the exchange", lambda c, _: not c.model.moe_shared_expert_intermediate_size),
    ),
    "dp": (
        ("a larger --global-batch-size", _always),
        ("--zero-stage 1", lambda c, _: c.zero.zero_stage > 1),
        ("--zero-reduce-every step", lambda c, _: c.zero.zero_stage > 1 and c.zero.zero_reduce_every != "step"),
        ("--zero-shard-size of a node", lambda c, layout: c.zero.zero_stage > 0 and layout.shard == layout.data),
    ),
    "pp": (
        ("a smaller --pipeline-model-parallel-size", _always),
        ("fewer --virtual-pipeline-stages", lambda _, layout: layout.chunks > 1 and not layout.v_shaped),
    ),
    "host": (
        ("more compute per block (a larger --micro-batch-size)", lambda c, layout: c.micro_batches(layout.dp) > 1),
        ("--no-checkpoint-in-cpu", lambda c, _: c.activations.checkpoint_in_cpu),
        ("--no-optimizer-cpu-offload", lambda c, _: c.optimizer.optimizer_cpu_offload),
    ),
    "bubble": (
        ("more micro-batches (a larger --global-batch-size)", _always),
        ("a smaller --micro-batch-size", lambda c, _: c.training.micro_batch_size > 1),
        (
            "--pipeline-schedule interleaved or zero-bubble",
            lambda c, _: (
                c.parallel.virtual_pipeline_stages == 1 and not SCHEDULES[c.parallel.pipeline_schedule].backlog
            ),
        ),
        ("fewer stages", _always),
    ),
    "copies": (("--no-checkpoint-in-cpu", lambda c, _: c.activations.checkpoint_in_cpu),),
}


class Plan(NamedTuple):
    """Predictions for a resolved configuration. stages: all pipeline stages, or the first and the last."""

    config: Config
    layout: Layout
    device: Device
    stages: list[StageBytes]
    time: StepTime

    @property
    def seconds(self) -> float:
        return self.time.expected.seconds

    @property
    def fullest(self) -> int:
        """The pipeline stage with the highest peak."""
        return max(range(len(self.stages)), key=lambda stage: self.stages[stage].peak)

    @property
    def usable(self) -> int:
        """Bytes of a device without those of libraries."""
        return self.device.usable_bytes(self.layout)

    @property
    def free(self) -> int:
        """Free bytes of the fullest device; negative if the run does not fit."""
        return self.usable - self.stages[self.fullest].peak

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.config.training.global_batch_size * self.config.model.seq_length

    @property
    def tflops(self) -> float:
        """TFLOP/s per device as in metrics.jsonl: recompute is not counted."""
        flops = model_flops(self.config.model, self.config.training.global_batch_size)
        return flops / self.seconds / self.layout.world_size / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization."""
        return self.tflops * 1e12 / self.device[f"compute.{self.config.training.precision}"]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def days(self) -> float:
        """Duration of --train-iters steps in days."""
        return self.config.training.train_iters * self.seconds / SECONDS_PER_DAY

    @property
    def reached(self) -> Reached | None:
        """The share of these speeds to expect; None on CPUs, whose constants are measured, and if it does not fit."""
        return reached() if self.device.kind == "cuda" and self.free >= 0 else None


def plan_config(config: Config) -> tuple[Config, Layout, Device]:
    """Check a command line as a run does, ignoring this machine and its files, and resolve it.

    Raises:
        ValueError: naming the flag, its value and the way out.
    """
    check_values(config)
    device = load_device(config.plan.device_type).multiplying(config.training)
    config, layout = resolve(config, config.plan.world_size or 1, vocabulary(config), declare)
    check_device(config, device.kind)
    return choose_exchange(config, layout, device), layout, device


def vocabulary(config: Config) -> int:
    """Return the tokenizer's vocabulary; 0 if the tokenizer is missing and --vocab-size is given."""
    try:
        tokenizer = data_tokenizer(config)
    except (ValueError, OSError):
        if config.model.vocab_size:
            return 0
        raise
    return tokenizer.vocab_size if tokenizer is not None else 0


def make_plan(config: Config, layout: Layout, device: Device) -> Plan:
    """Predict a resolved configuration on a device."""
    stages = [stage_bytes(config, layout, pp, device.kind) for pp in range(layout.pp)]
    return Plan(config=config, layout=layout, device=device, stages=stages, time=step_time(config, layout, device))


def plan_if_it_fits(config: Config, layout: Layout, device: Device) -> Plan | None:
    """Predict the values by which a search compares layouts; None if the layout does not fit.

    These are the bytes of the stages of which one holds the most, and the expected time of a step.
    """
    stages: list[StageBytes] = []
    for pp in telling_stages(config, layout):
        stages.append(stage_bytes(config, layout, pp, device.kind))
        if stages[-1].peak > device.usable_bytes(layout):
            return None
    return Plan(
        config=config,
        layout=layout,
        device=device,
        stages=stages,
        time=step_time(config, layout, device, with_range=False),
    )


def telling_stages(config: Config, layout: Layout) -> list[int]:
    """Return pipeline stages of which one holds the most bytes of all.

    These are the first and the last stage of each sequence of kinds of layers. Between two stages with the same layers,
    bytes change linearly with their number: kept inputs fall, postponed weight gradients rise.
    """
    ends: dict[tuple[tuple[str, ...], ...], list[int]] = {}
    for pp in range(layout.pp):
        spec = rank_spec(config, layout, pp, declare)
        kinds = tuple(tuple(layer.kind for layer in chunk) for chunk in spec.chunks)
        ends.setdefault(kinds, []).append(pp)
    return sorted({pp for stages in ends.values() for pp in (stages[0], stages[-1])})


def advice(plan: Plan) -> Iterator[str]:
    """Yield a sentence for each limit, with flags that change it."""
    parts = plan.time.expected.parts
    config, device = plan.config, plan.device
    if plan.free < 0:
        yield f"out of memory: a device of stage {plan.fullest} lacks {-plan.free / 1e9:.1f} GB; {_what_fits(plan)}"
        return
    worst = max((name for name in parts if name != "compute"), key=lambda name: parts[name])
    if parts[worst] >= 0.1 * plan.seconds:
        ways = [words for words, possible in ADVICE[worst] if possible(config, plan.layout)]
        shorter = f"; to shorten it: {'; '.join(ways)}" if ways else ""
        yield f"{worst} takes {parts[worst] / plan.seconds:.0%} of a step{shorter}"
    room = _with_less_recompute(plan)
    if room:
        yield room
    precision = config.training.precision
    others = [name for name in ("fp16", "bf16") if device[f"compute.{name}"] > 2 * device[f"compute.{precision}"]]
    if precision in ("fp16", "bf16") and others:
        ratio = device[f"compute.{others[0]}"] / device[f"compute.{precision}"]
        yield f"on {device.name}, --precision {others[0]} has {ratio:.0f} times the peak FLOP/s of {precision}"


def _peak(plan: Plan, config: Config) -> int:
    return stage_bytes(config, plan.layout, plan.fullest, plan.device.kind).peak


def _what_fits(plan: Plan) -> str:
    """Name flags, or a smaller model, with which the fullest stage fits."""
    kind = plan.device.kind
    lower = flags_that_fit(plan.config, plan.layout, kind, lambda changed, _: _peak(plan, changed) <= plan.usable)
    if lower:
        return f"it fits with {lower}"
    if plan.layout.world_size > 1:
        sizes = "--tensor-model-parallel-size, --context-parallel-size or --pipeline-model-parallel-size"
        return f"use more devices, or a larger {sizes}"

    def fits(smaller: Config, layout: Layout) -> bool:
        usable = plan.device.usable_bytes(layout)
        return least(smaller, layout, 0).total <= usable and stage_bytes(smaller, layout, 0, kind).peak <= usable

    preset = largest_preset(plan.config, fits)
    return f"{preset} is the largest preset that fits; or use more devices" if preset else "use more devices"


def _with_less_recompute(plan: Plan) -> str:
    """Return a sentence if there is memory for less recompute that saves 1 % of a step, else an empty text."""
    saved = plan.time.expected.parts["recompute"]
    if saved < plan.seconds / 100:
        return ""
    for kind in RECOMPUTE[: RECOMPUTE.index(plan.config.activations.recompute)]:
        values = {"recompute": kind, "partition-activations": False, "contiguous-checkpointing": False}
        changed = with_values(plan.config, values)
        if allowed(changed, plan.layout) and (peak := _peak(plan, changed)) <= plan.usable:
            return f"--recompute {kind} fits too ({peak / 1e9:.1f} GB per device), and saves up to {saved:.2f} s a step"
    return ""


def failure_ways(plan: Plan) -> list[Way]:
    """Return the ways to save that lose least to failures, if --mtbf is given."""
    hours = plan.config.plan.mtbf
    return ways(plan.config, plan.device, plan.layout.world_size, hours) if hours else []


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the contents of plan.json; `memory_bytes` and `traffic_bytes` have the keys of metrics.jsonl."""
    time, layout, model = plan.time, plan.layout, plan.config.model
    return {
        "device_type": plan.device.name,
        "world_size": layout.world_size,
        "layout": {name: getattr(layout, name) for name in ("pp", "dp", "cp", "tp", "ep", "etp", "shard", "chunks")},
        "parameters": num_parameters(declare(model)),
        "active_parameters": active_parameters(declare(model)),
        "fits": plan.free >= 0,
        "device_bytes": int(plan.device["memory.capacity"]),
        "reserved_bytes": plan.device.reserved_bytes(layout),
        "stages": [
            {
                "stage": number,
                "layers": rank_layers(layout, model.num_layers, number),
                "memory_bytes": stage.memory,
                "traffic_bytes": stage.traffic,
                "activation_bytes": stage.activations,
                "peak_bytes": stage.peak,
                "free_bytes": plan.usable - stage.peak,
                "at_peak": stage.at_peak,
            }
            for number, stage in enumerate(plan.stages)
        ],
        "step_seconds": plan.seconds,
        "step_seconds_range": [time.fast, time.slow],
        "step_parts": time.expected.parts,
        "tflops_per_device": plan.tflops,
        "mfu": plan.mfu,
        "tokens_per_second": plan.tokens_per_second,
        "days": plan.days,
        "expected": _expected(plan),
        "failures": [way._asdict() for way in failure_ways(plan)],
    }


def _expected(plan: Plan) -> dict[str, float | tuple[float, float]] | None:
    """Return the expected speed, with the range of published runs; the names are those of the plan's own values."""
    if plan.reached is None:
        return None
    speeds = {"tflops_per_device": plan.tflops, "mfu": plan.mfu, "tokens_per_second": plan.tokens_per_second}
    times = {"step_seconds": plan.seconds, "days": plan.days}
    found = {name: plan.reached.of(value) for name, value in speeds.items()}
    found |= {name: plan.reached.slowed(value) for name, value in times.items()}
    return {name: value for name, (value, _, _) in found.items()} | {
        f"{name}_range": (low, high) for name, (_, low, high) in found.items()
    }
