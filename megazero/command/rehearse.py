"""Steps of ranks of a larger world, on stand-in tensors (--rehearse)."""

from megazero.cluster import launch
from megazero.command.rehearsal.rehearsal import RehearsalDevice
from megazero.command.rehearsal.rehearsal_report import pretended_world, run_rehearsal
from megazero.engine.options.schema import Precision
from megazero.flags.cli import Command
from megazero.flags.config import Config
from megazero.flags.gpu_defaults import gpu_defaults
from megazero.flags.stack import Standing
from megazero.flags.stages import of_longest
from megazero.log import log
from megazero.planner.run_plan import vocabulary
from megazero.planner.search.choose import CPU, choose_layout
from megazero.planner.time.devices import load_device
from megazero.world import World


def rehearse(command: Command, world: World) -> None:
    """Run the steps, and report their bytes next to the predicted ones."""
    values, note = gpu_defaults(command.config, command.given, _fastest_precision(command.config, world))
    command = command.over("the default on GPUs", values, Standing.DERIVED)
    config = command.config
    config, of_stage, stage = of_longest(config)
    for line in filter(None, (note, stage)):
        log.info(line)
    if config.parallel.layout == "auto":
        on = config.plan.rehearse_on
        priced = load_device(config.plan.device_type or (CPU if RehearsalDevice.of(on).kind == CPU else ""))
        pretended = pretended_world(config, world)
        choice = choose_layout(
            config, command.given | of_stage, pretended, vocab_size=vocabulary(config), device=priced
        )
        log.info(choice.words(config, priced, command.dropped))
        config = choice.apply(config)
    run_rehearsal(config, world, vocabulary(config))


def _fastest_precision(config: Config, world: World) -> Precision | None:
    """Return the fastest precision of the device that the rehearsal imitates; None: it is no GPU."""
    if config.plan.rehearse_on != "here":
        return "bf16" if config.plan.rehearse_on == "gpu" else None
    device = launch.pick_device(world)
    return launch.fastest_precision(device) if device.type == "cuda" else None
