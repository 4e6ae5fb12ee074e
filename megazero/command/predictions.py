"""Predictions and rehearsals of a run, without the other ranks and without data: --plan, --plan-search, --rehearse."""

import sys
from pathlib import Path

from megazero.cluster import launch
from megazero.engine.options.schema import Precision
from megazero.flags.cli import Command, names_of
from megazero.flags.config import Config
from megazero.flags.implied import gpu_defaults
from megazero.flags.stack import Standing
from megazero.flags.stages import of_longest
from megazero.log import log
from megazero.planner import plan_report
from megazero.planner.run_plan import make_plan, plan_config, vocabulary
from megazero.planner.search import search_report
from megazero.planner.search.choose import CPU, choose_layout
from megazero.planner.time.devices import Device, load_device
from megazero.world import World


def predict(command: Command) -> None:
    """Print the predictions of --plan or --plan-search."""
    from rich.console import Console

    console, plan = Console(width=None if sys.stdout.isatty() else 160), command.config.plan
    device = load_device(plan.device_type)
    config, of_stage = longest_stage(
        command, device.fastest_precision if device.kind == "cuda" else None, device, plan.world_size or 1
    )
    if plan.plan_search:
        search_report.run_search(config, command.args, console, given=names_of(command.args) | of_stage)
        return
    found = make_plan(*plan_config(config))
    plan_report.show(found, console)
    if config.log.log_dir:
        plan_report.write_plan(found, Path(config.log.log_dir))


def rehearse(command: Command, world: World) -> None:
    """Run steps of ranks of a larger world on stand-in tensors, and report their bytes next to the predicted ones."""
    from megazero.command.rehearsal.rehearsal import RehearsalDevice  # not for a plan
    from megazero.command.rehearsal.rehearsal_report import pretended_world, run_rehearsal

    config = command.config
    named = config.plan.device_type or (CPU if RehearsalDevice.of(config.plan.rehearse_on).kind == CPU else "")
    device = load_device(named) if config.parallel.layout == "auto" else None
    config, _ = longest_stage(command, _fastest_precision(config, world), device, pretended_world(config, world))
    run_rehearsal(config, world, vocabulary(config))


def longest_stage(
    command: Command, fastest: Precision | None, device: Device | None, world: int
) -> tuple[Config, frozenset[str]]:
    """Return the options of the longest stage, with its layout and the defaults of the device, and the stage's flags.

    Args:
        fastest: precision in which the device multiplies fastest; None: it is no GPU.
        device: None: the layout is given.
    """
    values, note = gpu_defaults(command.config, command.given, fastest)
    command = command._replace(stack=command.stack.over("the default on GPUs", values, Standing.DERIVED))
    config, of_stage, stage = of_longest(command.config)
    other = "" if config.plan.rehearse else command.left_out(command.config)
    for line in filter(None, (note, other, stage)):
        log.info(line)
    if config.parallel.layout == "auto" and device is not None:
        choice = choose_layout(config, command.given | of_stage, world, vocab_size=vocabulary(config), device=device)
        log.info(choice.words(config, device, command.dropped))
        config = choice.apply(config)
    return config, of_stage


def _fastest_precision(config: Config, world: World) -> Precision | None:
    """Return the fastest precision of the device that the rehearsal imitates; None: it is no GPU."""
    if config.plan.rehearse_on != "here":
        return "bf16" if config.plan.rehearse_on == "gpu" else None
    device = launch.pick_device(world)
    return launch.fastest_precision(device) if device.type == "cuda" else None
