"""Pretrain a GPT model: read the flags, then predict, rehearse or train. Imports torch once the flags are accepted.

Exit codes: 0 done, or stopped as planned; 75 stopped early by a signal or the job's time limit, after saving; 1 an
error; 124 no progress (--hang-timeout); 130 interrupted twice, unsaved. See Note [Exit codes] in
megazero/run/stopping.py.
"""

import gc
import sys

from megazero.flags.cli import Command, read
from megazero.flags.validate import check_values, plans
from megazero.interop.huggingface.model_flags import find_model
from megazero.log import log, log_as
from megazero.run.stopping import Signals, again_words

# Modules that need torch are imported in functions, so that bad flags are refused without seconds of imports.
from megazero.world import World, read_world, report_to_launcher, under_torchrun


def pretrain(argv: list[str]) -> None:
    command, world = read_command(argv)
    from megazero.command.errors import reporting_errors

    _collect_garbage()
    with reporting_errors(command, world):
        if command.config.log.show_options:
            log.info(command.stack.table())
        elif plans(command.config.plan):
            from megazero.command.predictions import predict

            predict(command)
        elif command.config.plan.rehearse:
            from megazero.command.predictions import rehearse

            rehearse(command, world)
        else:
            _train(command, world)


def read_command(argv: list[str]) -> tuple[Command, World]:
    """Read the flags, their preset and the launcher's variables; refuse bad values, and exit."""
    world = World(0, 1, 0, "single")
    try:
        command = read(argv, lambda: read_world().size, find_model)
        if not plans(command.config.plan):
            world = read_world()
            log_as(world.rank, world.size)
        if command.config.training.recipe == "auto":
            from megazero.command.follow_recipe import follow_recipe

            command = follow_recipe(command)
        for note in command.notes:
            log.info(note)
        check_values(command.config)
    except ValueError as error:
        log.error(f"error: {error}")
        report_to_launcher(f"error: {error}")
        sys.exit(1)
    return command, world


def _train(command: Command, world: World) -> None:
    """Prepare the run, join the other ranks, train, and exit."""
    from megazero.cluster import launch
    from megazero.command import train as training

    with Signals(again_words(under_torchrun(), command.config.parallel.elastic)) as signals:
        launch.end_with_launcher(world)
        stop = training.train(command, world, signals)
    code = stop.exit_code if stop is not None else 0
    if world.has_peers:
        launch.exit_now(code)
    if code:
        sys.exit(code)


def _collect_garbage() -> None:
    """Collect garbage again, if `run_pretrain` has stopped it: collections are a sixth of torch's import."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def run_pretrain(argv: list[str] | None = None) -> None:
    """Run as a program; `argv` is by default that of the process."""
    gc.disable()  # see `_collect_garbage`
    pretrain(sys.argv[1:] if argv is None else argv)
