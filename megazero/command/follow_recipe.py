"""--recipe auto: a command with the values of the recipe, as if given."""

from __future__ import annotations

import math
from dataclasses import replace

from megazero.engine.model.stage import declare
from megazero.flags.cli import Command
from megazero.flags.recipe import RECIPE_FLAGS, ModelSize, recipe, recipe_words, with_recipe
from megazero.planner.parameter_counts import active_parameters
from megazero.planner.run_plan import vocabulary


def follow_recipe(command: Command) -> Command:
    """Return the command with the values of --recipe auto, and a note that explains each.

    Without a vocabulary, the command is returned as it is: a later check refuses it.

    Raises:
        ValueError: as `recipe`.
    """
    config = command.config
    vocab_size = config.model.vocab_size or vocabulary(config)
    if not vocab_size or not config.trains:
        return command
    layers = declare(replace(config.model, vocab_size=vocab_size))
    blocks = sum(math.prod(spec.shape) for name in layers.blocks for spec in layers.kinds[name].params)
    size = ModelSize(blocks, active_parameters(layers))
    chosen = recipe(config, command.given.intersection(RECIPE_FLAGS), size)
    config = with_recipe(config, chosen)
    given = command.given.union(each.flag for each in chosen) - {"recipe", "train-tokens"}
    return command._replace(config=config, given=given, notes=[*command.notes, recipe_words(config, chosen, size)])
