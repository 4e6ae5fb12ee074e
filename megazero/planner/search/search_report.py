"""The result of --plan-search: a table, and command lines."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from typing import TYPE_CHECKING

from megazero.called_as import in_own_words
from megazero.engine.options.option import RequiresAny
from megazero.engine.plan.layout.topology import Layout
from megazero.flags.config import Config
from megazero.flags.flag_names import LAYOUT_FLAGS, as_flag, flags, value_of
from megazero.planner.plan_report import plan_table, reached_words
from megazero.planner.run_plan import Plan, vocabulary
from megazero.planner.search.search import Search
from megazero.planner.time.devices import Device, load_device

if TYPE_CHECKING:
    from rich.console import Console

SHOWN, PRINTED = 10, 5  # rows of the table, command lines
COLUMNS = (
    "step s, TFLOP/s, expected, GB, tp, cp, pp, virtual, schedule, dp, ZeRO, shard, recompute, SP, Pa, micro, bubble, "
    "dp wait"
)

NODE_CPUS = 64  # which a node with GPUs has at least; SLURM refuses a job that asks for more CPUs than there are
OF_PLANS = tuple(name for name, flag in flags().items() if flag.all(RequiresAny))  # with a value that runs refuse


def run_search(config: Config, argv: list[str], console: Console, given: Collection[str] = ()) -> list[Plan]:
    """Search, with a progress bar, and print the fastest plans.

    Args:
        config: checked, parsed from `argv`.
        given: names of flags without dashes; layouts keep those of LAYOUT_FLAGS.
    """
    from rich.progress import Progress

    device = load_device(config.plan.device_type).multiplying(config.training)
    fixed = {name: value_of(config, name) for name in LAYOUT_FLAGS if name in given}
    search = Search(config=config, device=device, vocabulary=vocabulary(config), given=fixed or None)
    with Progress(console=console, transient=True) as progress:
        simulated = search.run(lambda steps, name: progress.track(steps, description=name))
    layouts, cluster = f"{len(search.found):,} layouts", f"{search.world} x {device.name}"
    fewer = ""
    if fixed:
        layouts += f" with {' '.join(as_flag(name, value) for name, value in fixed.items())}"
        fewer = "drop some of these flags, "
    if not simulated:
        console.print(
            f"none of {layouts} fits on {cluster}; {fewer}use more devices, --checkpoint-in-cpu, or a smaller model",
            highlight=False,
        )
        return []
    plans = simulated[:SHOWN]
    console.print(
        f"{layouts} on {cluster}; the {len(plans)} fastest of the {len(simulated)} simulated:"
        if len(simulated) > len(plans)
        else f"{layouts} on {cluster}; {len(simulated)} of them simulated, fastest first:",
        highlight=False,
    )
    columns, rows = COLUMNS.split(", "), [_row(plan) for plan in plans]
    if config.model.num_experts:
        at = columns.index("virtual")
        divided = [("ep", "etp"), *((plan.layout.ep, plan.layout.etp) for plan in plans)]
        for cells, more in zip([columns, *rows], divided, strict=True):
            cells[at:at] = map(str, more)
    console.print(plan_table("", columns, rows))
    if plans[0].reached:
        console.print(f"{reached_words(plans[0].reached)}; no GPU run has confirmed these", highlight=False)
    if missing := _to_add(config):
        console.print(f"to train, add {missing} to one of these lines:", highlight=False)
    for plan in plans[:PRINTED]:
        console.print(in_own_words(search_command(plan, config, argv)), soft_wrap=True, highlight=False, markup=False)
    return plans


def _row(plan: Plan) -> list[str]:
    config, layout, parts = plan.config, plan.layout, plan.time.expected.parts
    parallel, activations = config.parallel, config.activations
    cells = (
        f"{plan.seconds:.4g}",
        f"{plan.tflops:.1f}",
        f"{plan.reached.of(plan.tflops)[0]:.0f}" if plan.reached else "",
        f"{plan.stages[plan.fullest].peak / 1e9:.1f}",
        *(layout.tp, layout.cp, layout.pp, layout.chunks, parallel.pipeline_schedule, layout.dp),
        *(config.zero.zero_stage, layout.shard, activations.recompute),
        "yes" if parallel.sequence_parallel else "",
        "yes" if activations.partition_activations else "",
        config.training.micro_batch_size,
        f"{parts['bubble'] / plan.seconds:z.1%}",
        f"{parts['dp'] / plan.seconds:.1%}",
    )
    return list(map(str, cells))


def _to_add(config: Config) -> str:
    """Return the flags of data and folders that a run of this command line needs, or loses its results without."""
    wanted = {"data-path": "PREFIX", "save": "DIR", "log-dir": "DIR"}
    if config.data.mock_data:
        del wanted["data-path"]
    return " ".join(f"--{name} {value}" for name, value in wanted.items() if not value_of(config, name))


def search_command(plan: Plan, given: Config, argv: list[str]) -> str:
    """Return a command line that trains as planned: `argv` without the flags of plans, and the flags that differ."""
    args = [shlex.quote(arg) for arg in _without_plan(argv)]
    values = [(name, value_of(plan.config, name)) for name in LAYOUT_FLAGS]
    args += [as_flag(name, value) for name, value in values if value != value_of(given, name)]
    return f"{_launcher(plan.layout, plan.device)} {' '.join(args)}"


def _launcher(layout: Layout, device: Device) -> str:
    world = layout.world_size
    each = device.ranks_per_host(world)
    if world == 1:
        return "python pretrain_gpt.py"
    if world == each:
        return f"bash scripts/launch.sh --nproc {world}"
    options = f"--nodes={world // each}"
    if (hosts := device.ranks_per_node(world) // each) > 1:
        options += f" --segment={hosts}"  # SLURM's topology/block: as many hosts of the job in each NVLink domain
    options += f" --ntasks-per-node={each} --gpus-per-node={each} --cpus-per-task={max(1, NODE_CPUS // each)}"
    return f"sbatch {options} scripts/slurm/pretrain.sbatch"


def _without_plan(argv: list[str]) -> list[str]:
    left, rest = list[str](), iter(argv)
    for arg in rest:
        name = arg.removeprefix("--").partition("=")[0].replace("_", "-")
        if not arg.startswith("--") or name not in ("plan", "plan-search", *OF_PLANS):
            left.append(arg)
        elif name in OF_PLANS and "=" not in arg:
            next(rest, None)
    return left
