"""Values of a preset that give way to the rest of the command line, where the two would be refused together.

A preset describes a whole run, and a command line changes parts of it: a shorter run, no --save, one rank. A value that
the command line gives never gives way; if it is impossible, `validate` refuses it.
"""

from collections.abc import Collection
from typing import Any

from megazero.engine.options.option import Requires, Role
from megazero.flags.config import Config
from megazero.flags.flag_names import LAYOUT_FLAGS, as_flag, flags, flags_with, value_of
from megazero.flags.limit_checks import shorten
from megazero.flags.resolve import make_layout
from megazero.flags.rules import RULES, WITHOUT_TP
from megazero.flags.stack import Stack
from megazero.flags.validate import lacks_needed, needed_words, searches
from megazero.units import things

# Folders that other flags need: a preset leaves them to the command line.
FOLDERS = {*flags_with(Role.PLACE)} & {*flags_with(Role.PATH)}


def give_way(stack: Stack, preset: str, typed: Collection[str]) -> tuple[Stack, list[str]]:
    """Return the stack that the command line allows, and a line for each value of the preset that gave way.

    A flag of the preset that lacks another one gives way if the command line sets that one, or leaves out a folder.

    Args:
        preset: the source of its layer.
        typed: flags, without dashes, of the command line.
    """
    names = stack.of(preset)
    changes, gone = list[str](), list[str]()

    def change(name: str, value: Any, reason: str) -> Stack:
        old, new = (shorten(as_flag(name, each)) for each in (value_of(stack.config, name), value))
        changes.append(f"{preset}: {old} becomes {new}, because {reason}")
        return stack.over(f"{preset}, because {reason}", {name: value})

    for name in (name for name, flag in flags().items() if name in names and Role.KIND_OF_RUN not in flag.facts):
        needed = {needs.flag for needs in flags()[name].all(Requires)}
        if needed & ({*typed, *gone} | FOLDERS) and lacks_needed(stack.config, name):
            stack = change(name, flags()[name].default, f"it needs {needed_words(name)}")
            gone.append(name)
    config = stack.config
    if "sequence-parallel" in typed and config.parallel.sequence_parallel and not searches(config):
        if config.parallel.tensor_model_parallel_size == 1:  # scripts of Megatron-LM have it in every layout
            changes.append(f"--sequence-parallel has no effect, because {WITHOUT_TP}")
            stack = stack.over("--tensor-model-parallel-size", {"sequence-parallel": False})
    for rule in RULES:
        for name, value_and_reason in rule.gives_way.items():
            if name in names and value_of(stack.config, name) != flags()[name].default and rule.refusal(stack.config):
                stack = change(name, *value_and_reason(stack.config))
    return stack, changes


def without_layout(stack: Stack, preset: str, ranks: int) -> tuple[Stack, str]:
    """Return the stack of an evaluation without a preset's layout that its ranks do not fit, and a note of it.

    config.toml has the layout of the training run. An evaluation has the same result in each.
    """
    config, of_preset = stack.config, stack.of(preset)
    dropped = [name for name in LAYOUT_FLAGS if name in of_preset and value_of(config, name) != flags()[name].default]
    plain = stack.over("--eval-only", {name: flags()[name].default for name in dropped})
    if not dropped or _fits(config, ranks) or not _fits(plain.config, ranks):
        return stack, ""
    words = " ".join(as_flag(name, value_of(config, name)) for name in dropped)
    return plain, f"--eval-only on {things(ranks, 'rank')}, without {words} of {preset}; name a flag to keep it"


def _fits(config: Config, ranks: int) -> bool:
    try:
        make_layout(config, ranks)
    except ValueError:
        return False
    return True
