"""A plan as a table on the screen, as plan.json and as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from megazero.files import replace_file
from megazero.model.stage import declare
from megazero.plan.layers import num_parameters
from megazero.plan.operations import Backward, BackwardWeights, Forward, Recompute
from megazero.price.estimate import KINDS, stage_moments
from megazero.price.plan import SECONDS_PER_DAY, Plan, advice, as_json
from megazero.price.report import padding_warning, padding_words

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MOST_ROWS = 8  # pipeline stages of a table; plan.json has all
PART_NAMES = {
    "compute": "compute",
    "recompute": "recompute",
    "optimizer": "optimizer and norm",
    "tp": "waiting for tensor-parallel communication",
    "dp": "waiting for data-parallel communication",
    "pp": "waiting for messages between stages",
    "host": "waiting for copies from the host",
    "bubble": "bubble: waiting for other stages",
    "copies": "copies of kept inputs",
}
COLOURS = {Forward: "tab:blue", Recompute: "tab:cyan", Backward: "tab:orange", BackwardWeights: "tab:olive"}


def show(plan: Plan, console: Console) -> None:
    """Print a plan."""
    config = plan.config
    parameters = num_parameters(declare(config.model))
    console.print(
        f"{parameters / 1e9:.2f} B parameters on {plan.layout.world_size} x {plan.device.name}: "
        f"{plan.layout}, {config.micro_batches(plan.layout.dp)} micro-batches of {config.training.micro_batch_size}"
        f"{padding_words(config, plan.layout)}"
    )
    if warning := padding_warning(config, plan.layout):
        console.print(f"warning: {warning}", highlight=False)
    for table in _bytes_tables(plan):
        console.print(table)
    if len(plan.stages) > MOST_ROWS:
        console.print(f"({len(plan.stages)} stages; the others lie between these)")
    console.print(_step_table(plan))
    for line in summary(plan):
        console.print(line, highlight=False)


def _bytes_tables(plan: Plan) -> tuple[Table, Table]:
    from rich.table import Table

    memory = Table(title="GB of a device, by stage, when most is held", title_justify="left")
    traffic = Table(title="GB that a device sends in a step", title_justify="left")
    for heading in ("stage", *KINDS, "peak", "free"):
        memory.add_column(heading.replace("_", " "), justify="right")
    for heading in ("stage", *plan.stages[0].traffic):
        traffic.add_column(heading, justify="right")
    for number in _rows(plan):
        stage = plan.stages[number]
        free = (plan.usable - stage.peak) / 1e9
        cells = [f"{stage.at_peak[kind] / 1e9:.2f}" for kind in KINDS]
        marked = f"[red]{free:.2f}[/red]" if free < 0 else f"{free:.2f}"
        memory.add_row(str(number), *cells, f"{stage.peak / 1e9:.2f}", marked)
        traffic.add_row(str(number), *(_amount(num_bytes) for num_bytes in stage.traffic.values()))
    return memory, traffic


def _step_table(plan: Plan) -> Table:
    from rich.table import Table

    expected = plan.time.expected
    table = Table(title=f"seconds of a step, on stage {expected.rank}, which computes longest", title_justify="left")
    table.add_column("part")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    for name, seconds in expected.parts.items():
        if seconds > 5e-5 * plan.seconds:
            table.add_row(PART_NAMES[name], f"{seconds:.4g}", f"{seconds / plan.seconds:.1%}")
    table.add_row("step", f"{plan.seconds:.4g}", "")
    return table


def summary(plan: Plan) -> list[str]:
    """The lines under the tables: speed, duration, and what limits them."""
    time, config = plan.time, plan.config
    capacity = plan.device["memory.capacity"] / 1e9
    reserved, groups = plan.device.reserved_bytes(plan.layout) / 1e9, plan.layout.communicators()
    nccl = f" ({groups} communicators of NCCL)" if groups and plan.device.kind == "cuda" else ""
    tokens, steps = plan.tokens * config.training.train_iters, config.training.train_iters
    ramps = bool(config.training.rampup_batch_size)
    host = max(stage.memory["host"] for stage in plan.stages)
    lines = [
        f"step: {plan.seconds:.4g} s; {time.fast:.4g} to {time.slow:.4g} if all constants of {plan.device.name} err "
        "alike",
        f"speed: {plan.tflops:.1f} TFLOP/s per device (recompute not counted), MFU {plan.mfu:.1%} "
        f"({plan.mfu * plan.seconds / time.slow:.1%} to {plan.mfu * plan.seconds / time.fast:.1%}), "
        f"{plan.tokens / plan.seconds * SECONDS_PER_DAY / 1e9:.2f} B tokens a day",
        *[f"--train-iters {steps}: {tokens / 1e9:.2f} B tokens, {plan.days:.1f} days"] * (plan.free >= 0),
        *["all of a step of the full --global-batch-size, which --rampup-batch-size reaches later"] * ramps,
        f"memory: {capacity:.1f} GB a device, of which {reserved:.1f} GB are taken to be the libraries'{nccl}; "
        + (f"{plan.free / 1e9:.1f} GB free on the fullest" if plan.free >= 0 else "DOES NOT FIT"),
    ]
    if host:
        each = min(plan.device.devices_per_node, plan.layout.world_size)
        lines.append(f"host memory: {host * each / 1e9:.1f} GB a node for kept inputs")
    return lines + [f"limit: {line}" for line in advice(plan)]


def _rows(plan: Plan) -> list[int]:
    count = len(plan.stages)
    if count <= MOST_ROWS:
        return list(range(count))
    return sorted({0, 1, 2, count // 2, count - 2, count - 1, plan.fullest})


def _amount(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3f}" if num_bytes >= 1e6 else f"{num_bytes:,} B"


def write(plan: Plan, folder: Path) -> None:
    """Write plan.json and plan.png into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "plan.json", json.dumps(as_json(plan), indent=1) + "\n")
    draw(plan, folder / "plan.png")


def draw(plan: Plan, path: Path) -> None:
    """Draw bytes by kind of every stage; below, those of the fullest stage over a step, and its operations."""
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
    bars.set(xlabel="pipeline stage", ylabel="GB of a device", title=f"when most is held: {plan.layout}")
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
