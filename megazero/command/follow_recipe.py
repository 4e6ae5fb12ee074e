"""--recipe auto: a command with the values of the recipe, as if given."""

import math
from dataclasses import replace
from pathlib import Path

from megazero import checkpoint
from megazero.checkpoint.manifest import unchecked_state
from megazero.engine.model.stage import declare
from megazero.flags.cli import Command
from megazero.flags.recipe import RECIPE_FLAGS, ModelSize, not_initial, recipe, recipe_words
from megazero.flags.stack import Standing
from megazero.planner.parameter_counts import active_parameters
from megazero.planner.run_plan import vocabulary
from megazero.run.run_state import RunState, is_hugging_face


def follow_recipe(command: Command) -> Command:
    """Return the command with the values of --recipe auto, and a note that explains each.

    Without a vocabulary, the command is returned as it is: a later check refuses it.

    Raises:
        ValueError: as `recipe`; or the run begins with weights of another.
    """
    config = command.config
    if config.trains and (load := config.checkpoint.load) and _has_other_weights(Path(load)):
        raise not_initial(f"--load {load}, which has weights of another run and no optimizer states")
    vocab_size = config.model.vocab_size or vocabulary(config)
    if not vocab_size or not config.trains:
        return command
    layers = declare(replace(config.model, vocab_size=vocab_size))
    blocks = sum(math.prod(spec.shape) for name in layers.blocks for spec in layers.kinds[name].params)
    size = ModelSize(blocks, active_parameters(layers))
    chosen = recipe(config, command.given.intersection(RECIPE_FLAGS), size)
    values = {each.flag: each.value for each in chosen if not each.kept}
    stack = command.stack.over("--recipe auto", values, Standing.GIVEN, undone=("recipe", "train-tokens"))
    return command._replace(stack=stack, notes=[*command.notes, recipe_words(stack.config, chosen, size)])


def _has_other_weights(load: Path) -> bool:
    """Return whether --load begins a run from weights: of a Hugging Face folder, imported, or merged."""
    if is_hugging_face(load):
        return True
    found = [load] if load.name.startswith("iter_") else checkpoint.checkpoints(load)[::-1]
    for folder in found:
        try:
            return RunState.parse(unchecked_state(folder)).weights_only
        except ValueError:  # damaged: a later check reports it
            continue
    return False
