"""A plan as tables on the screen, as plan.json and as a picture."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.zero_policy import offload_fraction
from megazero.engine.plan.program.operations import Backward, BackwardWeights, Forward, Recompute
from megazero.files import replace_file
from megazero.log import log
from megazero.optional import missing_package
from megazero.planner import goodput
from megazero.planner.bytes.bytes_report import expert_words, padding_warning, padding_words
from megazero.planner.bytes.capacity import checkpoint_bytes, memory_copies
from megazero.planner.bytes.estimate import KINDS, stage_moments
from megazero.planner.expected import Reached
from megazero.planner.layouts import layout_words
from megazero.planner.parameter_counts import num_parameters
from megazero.planner.run_plan import SECONDS_PER_DAY, Plan, advice, as_json, failure_ways
from megazero.planner.time.devices import communicators
from megazero.units import duration, size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MOST_ROWS = 8  # pipeline stages of a table; plan.json has all
PART_NAMES = {
    "compute": "compute",
    "recompute": "recompute",
    "optimizer": "optimizer and norm",
    "tp": "waiting for tensor-parallel communication",
    "cp": "waiting for keys and values of other ranks",
    "ep": "waiting for tokens of experts",
    "dp": "waiting for data-parallel communication",
    "pp": "waiting for messages between stages",
    "host": "waiting for copies from the host",
    "bubble": "bubble: waiting for other stages",
    "copies": "copying inputs kept for recompute",
}
COLOURS = {Forward: "tab:blue", Recompute: "tab:cyan", Backward: "tab:orange", BackwardWeights: "tab:olive"}


def show(plan: Plan, console: Console) -> None:
    """Print a plan."""
    config, layout = plan.config, plan.layout
    parameters = num_parameters(declare(config.model))
    exchange = f"--cp-exchange {config.parallel.cp_exchange}, " if layout.cp > 1 else ""
    console.print(
        f"{parameters / 1e9:.2f} B parameters on {layout.world_size} x {plan.device.name}: "
        f"{layout_words(layout)}, {exchange}"
        f"{config.micro_batches(layout.dp)} micro-batches of {config.training.micro_batch_size}"
        f"{padding_words(config, layout)}"
    )
    for line in expected_lines(plan):
        console.print(line, highlight=False)
    if words := expert_words(config.model):
        console.print(f"experts: {words}", highlight=False)
    if warning := padding_warning(config, layout):
        console.print(f"warning: {warning}", highlight=False)
    stages = [(str(number), plan.stages[number]) for number in _rows(plan)]
    kinds = [kind.replace("_", " ") for kind in KINDS]
    held = [(name, *_gigabytes(*stage.at_peak.values(), stage.peak), _free(plan, stage.peak)) for name, stage in stages]
    console.print(plan_table("GB per device at the peak of a step", ("stage", *kinds, "peak", "free"), held))
    sent = [(name, *map(_amount, stage.traffic.values())) for name, stage in stages]
    console.print(plan_table("GB sent per device and step", ("stage", *plan.stages[0].traffic), sent))
    if len(plan.stages) > MOST_ROWS:
        console.print(f"({len(plan.stages)} stages; the others are between these)")
    if plan.free >= 0:
        title = f"seconds of a step on stage {plan.time.expected.rank}, the busiest"
        console.print(plan_table(title, ("part", "seconds", "share"), _parts(plan)))
    for line in summary(plan):
        console.print(line, highlight=False)
    if config.plan.mtbf and plan.free >= 0:
        show_failures(plan, console)


def show_failures(plan: Plan, console: Console) -> None:
    """Print the best intervals of checkpoints, and goodput, of this job and of others of the same model."""
    hours, own = plan.config.plan.mtbf, plan.layout.world_size
    rows = []
    for devices in (own, *(each for each in goodput.SIZES if each != own)):
        found = goodput.ways(plan.config, plan.device, devices, hours)
        numbers = (word for way in found for word in (duration(way.interval), f"{way.goodput:.2%}"))
        rows.append((f"{devices:,}", duration(goodput.SECONDS_PER_HOUR * hours / devices), *numbers))
    headings = "devices", "between failures", "save to disk every", "goodput", "copy to memory every", "goodput"
    console.print(plan_table(f"failures, every {hours:g} hours of a device", headings, rows))
    disk, memory = (max(1, round(way.interval / plan.seconds)) for way in failure_ways(plan))
    console.print(
        f"this job: --save-interval {disk}, or --memory-checkpoint-interval {memory} with rare saves; a checkpoint has "
        f"{size(checkpoint_bytes(plan.config))}",
        highlight=False,
    )


def plan_table(title: str, headings: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """Make a table of numbers, and of names in a column "part"."""
    from rich.table import Table

    found = Table(title=title, title_justify="left")
    for heading in headings:
        found.add_column(heading, justify="left" if heading == "part" else "right")
    for row in rows:
        found.add_row(*row)
    return found


def _gigabytes(*numbers: int) -> list[str]:
    return [f"{num_bytes / 1e9:.2f}" for num_bytes in numbers]


def _free(plan: Plan, peak: int) -> str:
    (free,) = _gigabytes(plan.usable - peak)
    return free if peak <= plan.usable else f"[red]{free}[/red]"


def _parts(plan: Plan) -> Iterator[tuple[str, str, str]]:
    for name, seconds in plan.time.expected.parts.items():
        if seconds > 5e-5 * plan.seconds:
            yield PART_NAMES[name], f"{seconds:.4g}", f"{seconds / plan.seconds:.1%}"
    yield "step", f"{plan.seconds:.4g}", ""


def expected_lines(plan: Plan) -> list[str]:
    """Return the speed to expect, and the reason."""
    if plan.reached is None:
        return []
    speed, *speeds = (f"{each:,.0f}" for each in plan.reached.of(plan.tokens_per_second / plan.layout.world_size))
    mfu, *mfus = (f"{each:.1%}" for each in plan.reached.of(plan.mfu))
    return [
        f"expected: {speed} tokens/s per device ({' to '.join(speeds)}), MFU {mfu} ({' to '.join(mfus)}); "
        "no GPU run has confirmed this",
        reached_words(plan.reached),
    ]


def reached_words(share: Reached) -> str:
    """Report the shares of their plans that published runs reached."""
    return (
        f"{share.runs} published runs without experts reached {share.least:.0%} to {share.most:.0%} of their planned "
        f"speed, {share.median:.0%} in the median"
    )


def _length(plan: Plan) -> str:
    """Return how long the run takes, in the unit in which that is not much less than 1."""
    days, *ends = plan.reached.slowed(plan.days) if plan.reached else (plan.days,)
    unit, factor = ("days", 1) if days >= 1 else ("hours", 24) if days >= 1 / 24 else ("minutes", 24 * 60)
    length = f"{factor * days:.1f} {unit}"
    return f"{length} expected ({' to '.join(f'{factor * each:.1f}' for each in ends)})" if ends else length


def _planned_lines(plan: Plan) -> list[str]:
    """Return the planned times, with the range of the device's constants; none if the layout does not fit."""
    time, training, device, seconds = plan.time, plan.config.training, plan.device, plan.seconds
    steps, tokens = training.train_iters, plan.tokens * training.train_iters
    if plan.free < 0:
        return []
    lines = [
        f"planned step: {seconds:.4g} s; {time.fast:.4g} to {time.slow:.4g} s with all constants of {device.name} at "
        "the fast or the slow end of their range",
        f"planned speed: {plan.tflops:.1f} TFLOP/s per device (recompute not counted), MFU {plan.mfu:.1%} "
        f"({plan.mfu * seconds / time.slow:.1%} to {plan.mfu * seconds / time.fast:.1%}), "
        f"{plan.tokens_per_second * SECONDS_PER_DAY / 1e9:.2f} B tokens a day",
        f"--train-iters {steps}: {tokens / 1e9:.2f} B tokens, {_length(plan)}",
    ]
    if training.rampup_batch_size:
        lines.append("these are steps of the full --global-batch-size, which --rampup-batch-size reaches later")
    return lines


def summary(plan: Plan) -> list[str]:
    """Return the lines under the tables: planned speed, duration, memory and limits."""
    device, lines = plan.device, _planned_lines(plan)
    reserved, groups = device.reserved_bytes(plan.layout) / 1e9, communicators(plan.layout)
    nccl = f" ({groups} NCCL communicators)" if groups and device.kind == "cuda" else ""
    left = f"{plan.free / 1e9:.1f} GB free on the fullest device" if plan.free >= 0 else "DOES NOT FIT"
    capacity = device["memory.capacity"] / 1e9
    lines.append(
        f"memory: {capacity:.1f} GB per device, {reserved:.1f} GB of them reserved for libraries{nccl}; {left}"
    )
    host = max(stage.memory["host"] for stage in plan.stages)
    if host:
        each = device.ranks_per_host(plan.layout.world_size)
        held = ["optimizer states and gradients"] if offload_fraction(plan.config) else []
        held += ["inputs kept for recompute"] if plan.config.activations.checkpoint_in_cpu else []
        held += ["checkpoints on their way to memory"] if plan.config.checkpoint.memory_checkpoint_interval else []
        lines.append(f"host memory: {host * each / 1e9:.1f} GB per node for {' and '.join(held)}")
        if files := max(stage.memory["nvme"] for stage in plan.stages):
            lines.append(f"files: {files * each / 1e9:.1f} GB per node in --optimizer-nvme-offload")
        if plan.config.checkpoint.memory_checkpoint_interval:
            nodes = -(-plan.layout.world_size // each)
            kept = memory_copies(plan.config, nodes) / 1e9
            lines.append(f"checkpoints in memory: {kept:.1f} GB per node in --memory-checkpoint-dir")
    return lines + [f"limit: {line}" for line in advice(plan)]


def _rows(plan: Plan) -> list[int]:
    count = len(plan.stages)
    if count <= MOST_ROWS:
        return list(range(count))
    return sorted({0, 1, 2, count // 2, count - 2, count - 1, plan.fullest})


def _amount(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3f}" if num_bytes >= 1e6 else f"{num_bytes:,} B"


def write_plan(plan: Plan, folder: Path) -> None:
    """Write plan.json into `folder`, and plan.png if matplotlib is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "plan.json", json.dumps(as_json(plan), indent=1) + "\n")
    try:
        draw_plan(plan, folder / "plan.png")
    except ModuleNotFoundError as error:
        log.info(f"plan.png is not drawn: it {missing_package(error)}")


def draw_plan(plan: Plan, path: Path) -> None:
    """Draw the bytes of every stage by kind; below, those of the fullest stage over a step, and its operations."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (bars, over, ops) = plt.subplots(3, 1, figsize=(10, 9), height_ratios=(5, 5, 0.6), layout="constrained")
    numbers, bottom = range(len(plan.stages)), [0.0] * len(plan.stages)
    for kind in KINDS:
        heights = [stage.at_peak[kind] / 1e9 for stage in plan.stages]
        bars.bar(numbers, heights, bottom=bottom, label=kind.replace("_", " "))
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    bars.axhline(plan.usable / 1e9, color="red", linestyle="--", label=f"usable of {plan.device.name}")
    bars.set(xlabel="pipeline stage", ylabel="GB of a device", title=f"peak of a step: {layout_words(plan.layout)}")
    bars.legend(ncol=4, fontsize="small")
    moments = stage_moments(plan.config, plan.layout, plan.fullest, plan.device.kind)
    over.stackplot(
        range(len(moments)), *([m.held[n] / 1e9 for m in moments] for n in range(len(KINDS))), step="post", labels=KINDS
    )
    over.set(ylabel="GB", title=f"a device of stage {plan.fullest} over a step, by operation")
    for op, colour in COLOURS.items():
        spans = [(n, 1) for n, moment in enumerate(moments) if isinstance(moment.op, op)]
        ops.broken_barh(spans, (0, 1), color=colour, label=op.__name__)
    for axes in (over, ops):
        axes.set_xlim(0, len(moments))
    ops.set(yticks=[], xlabel="operations of the step")
    ops.legend(ncol=4, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.9))
    figure.savefig(path, dpi=110)
    plt.close(figure)
