"""Predictions of a run (--plan, --plan-search), without starting a rank or opening data."""

import sys
from pathlib import Path

from megazero.flags.cli import Command, names_of
from megazero.flags.gpu_defaults import gpu_defaults
from megazero.flags.stack import Standing
from megazero.flags.stages import of_longest
from megazero.log import log
from megazero.planner import plan_report
from megazero.planner.run_plan import make_plan, plan_config, vocabulary
from megazero.planner.search import search_report
from megazero.planner.search.choose import choose_layout
from megazero.planner.time.devices import load_device


def predict(command: Command) -> None:
    """Print the predictions of --plan or --plan-search."""
    from rich.console import Console

    console, config = Console(width=None if sys.stdout.isatty() else 160), command.config
    device = load_device(config.plan.device_type)
    values, note = gpu_defaults(
        command.config, command.given, device.fastest_precision if device.kind == "cuda" else None
    )
    command = command.over("the default on GPUs", values, Standing.DERIVED)
    config = command.config
    config, of_stage, stage = of_longest(config)
    for line in filter(None, (note, command.left_out(config), stage)):
        log.info(line)
    if config.parallel.layout == "auto":
        world = config.plan.world_size or 1
        choice = choose_layout(config, command.given | of_stage, world, vocab_size=vocabulary(config), device=device)
        log.info(choice.words(config, device, command.dropped))
        config = choice.apply(config)
    if config.plan.plan_search:
        search_report.run_search(config, command.args, console, given=names_of(command.args) | of_stage)
        return
    plan = make_plan(*plan_config(config))
    plan_report.show(plan, console)
    if config.log.log_dir:
        plan_report.write_plan(plan, Path(config.log.log_dir))
