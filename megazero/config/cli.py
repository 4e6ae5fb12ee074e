"""The command line: flags over those of a preset, over the defaults of an architecture, over all other defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from megazero.config.architectures import ARCHITECTURES
from megazero.config.flags import flags, to_toml, toml_value, value_of, with_values
from megazero.config.foreign.translate import OWN_WORDS, refusals, split_items, translate
from megazero.config.help import show_normal
from megazero.config.limits import check_text
from megazero.config.presets import Preset, read_preset
from megazero.config.schema import Config
from megazero.log import log

PROGRAM = "pretrain_gpt.py"


class Command(NamedTuple):
    """A command line, read.

    Attributes:
        config: not yet resolved.
        args: the command line with foreign flags translated, without the flags of the preset.
        given: names of the flags, without dashes, that the command line or its preset sets.
        notes: lines that report translated foreign flags, accepted ones without effect, and ignored retired ones.
    """

    config: Config
    args: list[str]
    given: frozenset[str]
    notes: list[str]

    def to_toml(self, resolved: Config) -> str:
        """Format the given flags as a preset of the same run, and derived values as comments."""
        text = to_toml(self.config, self.given)
        derived = [
            f"# {name} = {toml_value(value_of(resolved, name))}\n"
            for name in flags()
            if value_of(self.config, name) != value_of(resolved, name)
        ]
        if derived:
            text += "\n# Derived from these for this run; a --preset does not fix it. plan.txt has all options.\n"
        return text + "".join(derived)


def parse(argv: list[str]) -> Config:
    """Return the configuration of a command line. Raises as `read`."""
    return read(argv).config


def read(argv: list[str], count_ranks: Callable[[], int] = lambda: 1) -> Command:
    """Read a command line, in which flags of Megatron-LM, DeepSpeed and Hugging Face may be mixed with ours.

    Args:
        count_ranks: returns the number of ranks of the run. Called only if a foreign flag depends on it, such as
            --gradient_accumulation_steps.

    Raises:
        ValueError: a foreign flag cannot be translated; or the preset is unknown, or one of its keys or values is.
        SystemExit: --help, --help-all, or an unknown flag; the message is printed.
    """
    import tyro

    if "--help" in argv or "-h" in argv:
        show_normal(PROGRAM)
    argv = ["--help" if word == "--help-all" else word for word in argv]
    name = _last_value(argv, "preset")
    check_text("preset", name, is_path=True)
    preset = read_preset(name) if name else Preset({}, [])
    translated = translate(argv, preset.values, count_ranks)
    refused = refusals(translated.answers)
    if any(answer.unknown for answer in translated.answers):
        log.error(refused)
        raise SystemExit(2)
    if refused:
        raise ValueError(refused)
    args, notes = translated.args, [*preset.notes, *translated.notes]
    defaults = _defaults(_last_value(args, "architecture"), preset.values)
    try:
        config = tyro.cli(Config, default=defaults, args=args, prog=PROGRAM, config=(tyro.conf.OmitArgPrefixes,))
    except SystemExit as stop:
        if stop.code and notes:  # the message names the translation of a foreign flag
            log.error("\n".join(notes))
        raise
    return Command(config, args, frozenset(preset.values) | names_of(args), notes)


def _defaults(architecture: str, preset: Mapping[str, Any]) -> Config:
    """Return the configuration that the command line changes."""
    entry = ARCHITECTURES.get(architecture or preset.get("architecture", ""))
    return with_values(Config(), {**(entry.defaults if entry else {}), **preset})


def names_of(args: list[str]) -> frozenset[str]:
    """Return the flags that a translated command line sets, without dashes."""
    found = {item.name for item in split_items(args) if item.name not in OWN_WORDS}
    return frozenset(name if name in flags() else name.removeprefix("no-") for name in found if name)


def _last_value(argv: list[str], flag: str) -> str:
    """Return the last value of a flag; empty if it has none."""
    values = [item.values[0] for item in split_items(argv) if item.name == flag and item.values]
    return values[-1] if values else ""
