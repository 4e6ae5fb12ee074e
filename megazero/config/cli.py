"""Flags, presets and their TOML files, made from the dataclass tree of `schema`."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import tomllib
import typing
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megazero.config.architectures import ARCHITECTURES
from megazero.config.foreign.translate import OWN_WORDS, Option, UnknownFlags, refusals, split_items, translate
from megazero.config.help import show_normal
from megazero.config.limits import Range, check_text
from megazero.config.schema import Config
from megazero.log import log

PRESETS = Path(__file__).parent / "presets"  # a link to scripts/presets; files of the package where it is installed


PROGRAM = "pretrain_gpt.py"


@functools.cache
def flags() -> dict[str, tuple[str, Any]]:
    """Return (group, type) of every flag except --preset, by its name without dashes."""
    found = {}
    for group in dataclasses.fields(Config):
        cls = typing.get_type_hints(Config)[group.name]
        if dataclasses.is_dataclass(cls):
            hints = typing.get_type_hints(cls)
            for option in dataclasses.fields(cls):
                found[option.name.replace("_", "-")] = (group.name, hints[option.name])
    return found


@functools.cache
def ranges() -> dict[str, Range]:
    """Return the range of every flag that takes a number; the other flags take no number."""
    found: dict[str, Range] = {}
    for name, (group, _) in flags().items():
        cls = typing.get_type_hints(Config)[group]
        hint = typing.get_type_hints(cls, include_extras=True)[name.replace("-", "_")]
        for extra in getattr(hint, "__metadata__", ()):
            if isinstance(extra, Range):
                found[name] = extra
    return found


class Command(NamedTuple):
    """A command line, read.

    Attributes:
        config: not yet resolved.
        args: the command line in our words, without the preset's.
        given: names of the flags, without dashes, that the command line or its preset set.
        notes: what foreign flags became: a line for those translated, a line for those without anything to do.
    """

    config: Config
    args: list[str]
    given: frozenset[str]
    notes: list[str]

    def to_toml(self, resolved: Config) -> str:
        """Format what was given, as a preset of the same run, and what was derived for it, as comments."""
        only = {name.replace("-", "_") for name in self.given}
        lines = [to_toml(self.config, only)]
        derived = [
            f"# {name} = {_toml_value(_value(resolved, name))}"
            for name in flags()
            if _value(self.config, name) != _value(resolved, name)
        ]
        if derived:
            lines += [
                "# Derived from these for this run; a --preset does not fix it. plan.txt has all options.",
                *derived,
                "",
            ]
        return "\n".join(lines)


def parse(argv: list[str]) -> Config:
    """The flags, over those of a preset, if one is named, over the architecture's defaults, over all others.

    Raises: as `read`.
    """
    return read(argv).config


def read(argv: list[str], count_ranks: Callable[[], int] = lambda: 1) -> Command:
    """Read a command line, which may have flags of Megatron-LM, DeepSpeed and Hugging Face among ours.

    Args:
        count_ranks: returns the number of ranks of the run. Asked only where a foreign flag depends on it, such as
            --gradient_accumulation_steps.

    Raises:
        ValueError: a foreign flag that has no equal; an unknown preset, or a key or a value in it that is no flag's.
        SystemExit: --help, --help-all, or a flag that is mistyped; the message is printed.
    """
    import tyro

    if "--help" in argv or "-h" in argv:
        show_normal(Config(), {name: group for name, (group, _) in flags().items()}, PROGRAM)
    argv = ["--help" if word == "--help-all" else word for word in argv]
    preset = _value_of(argv, "preset")
    check_text("preset", preset, is_path=True)
    under = preset_args(_find_preset(preset)) if preset else []
    try:
        translated = translate(argv, options(), under, count_ranks)
    except UnknownFlags as error:
        log.error(error)
        raise SystemExit(2) from None
    refused = refusals(translated.answers)
    if refused:
        raise ValueError(refused)
    args = translated.args
    entry = ARCHITECTURES.get(_value_of([*under, *args], "architecture"))
    defaults = list(entry.defaults) if entry is not None else []
    config = tyro.cli(Config, args=defaults + under + args, prog=PROGRAM, config=(tyro.conf.OmitArgPrefixes,))
    return Command(config, args, names_of([*under, *args]), translated.notes)


@functools.cache
def options() -> dict[str, Option]:
    """Return the kind and the default of every flag, for `translate`."""
    config, found = Config(), {}
    for name, (_, kind) in flags().items():
        default = _value(config, name)
        found[name] = Option(
            kind, " ".join(default) if isinstance(default, tuple) else str(default), ranges().get(name)
        )
    return found


def _value(config: Config, name: str) -> Any:
    return getattr(getattr(config, flags()[name][0]), name.replace("-", "_"))


def names_of(args: list[str]) -> frozenset[str]:
    """Return which flags a command line in our words sets."""
    found = {item.name for item in split_items(args) if item.name not in OWN_WORDS}
    return frozenset(name if name in flags() else name.removeprefix("no-") for name in found if name)


def whole_numbers(argv: list[str], defaults: dict[str, int]) -> tuple[list[int], list[str]]:
    """Take `--name N` options that are not of the configuration out of a command line.

    Args:
        defaults: name -> value where the option is missing.

    Returns:
        The values in the order of `defaults`, and the arguments that are left.
    """
    found, left = dict(defaults), list[str]()
    rest = iter(argv)
    for arg in rest:
        name, _, value = arg.removeprefix("--").partition("=")
        if not arg.startswith("--") or name not in defaults:
            left.append(arg)
            continue
        value = value or next(rest, "")
        if not value.isdecimal():
            raise ValueError(f"--{name} {value}: must be a whole number, such as {max(1, defaults[name])}")
        found[name] = int(value)
    return list(found.values()), left


def _value_of(argv: list[str], flag: str) -> str:
    """Return the value that is given last; empty if none is."""
    found = ""
    for at, arg in enumerate(argv):
        if arg == f"--{flag}" and at + 1 < len(argv):
            found = argv[at + 1]
        elif arg.startswith(f"--{flag}="):
            found = arg.removeprefix(f"--{flag}=")
    return found


def _find_preset(name: str) -> Path:
    for path in (Path(name), PRESETS / f"{name}.toml", PRESETS / name):
        if path.is_file():
            return path
    known = preset_names()
    close = difflib.get_close_matches(Path(name).stem, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ValueError(f"--preset {name}: no such file, nor a preset; there are {', '.join(known)}{hint}")


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def preset_values(name: str) -> dict[str, Any]:
    """The flags of a preset that `parse` has accepted, without dashes, and their values as TOML has them."""
    return tomllib.loads(_find_preset(name).read_text(encoding="utf-8"))


def preset_args(path: Path) -> list[str]:
    """The flags that a preset stands for.

    Raises:
        ValueError: not TOML, an unknown key, or a value of the wrong type.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"--preset {path}: not a TOML file: {error}") from None
    known = flags()
    args: list[str] = []
    for key, value in values.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else "; see --help for the flags"
            raise ValueError(f"--preset {path}: unknown key {key!r}{hint}")
        args += _as_args(path, key, value, known[key][1])
    return args


def _as_args(path: Path, key: str, value: Any, kind: Any) -> list[str]:
    def refuse(wanted: str) -> ValueError:
        return ValueError(f"--preset {path}: {key} = {json.dumps(value, default=str)} must be {wanted}")

    if typing.get_origin(kind) is Literal:
        if value not in typing.get_args(kind) or type(value) is not type(typing.get_args(kind)[0]):
            raise refuse("one of " + ", ".join(map(str, typing.get_args(kind))))
        return [f"--{key}", str(value)]
    if kind is bool:
        if not isinstance(value, bool):
            raise refuse("true or false")
        return [f"--{key}" if value else f"--no-{key}"]
    if kind in (int, float):
        if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int):
            raise refuse("a whole number" if kind is int else "a number")
        return [f"--{key}", repr(value)]
    if kind is str:
        if not isinstance(value, str):
            raise refuse("a string")
        return [f"--{key}={value}"]  # in one piece: it may begin with a dash
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(v, (str, int, float)) for v in values):
        raise refuse("a list of strings")
    if any(isinstance(v, bool) or str(v).startswith("-") for v in values):
        raise refuse("a list of names and numbers, none of which begins with a dash")
    return [f"--{key}", *map(str, values)]


def to_toml(config: Config, only: Collection[str] | None = None) -> str:
    """Every flag but --preset, grouped: a preset that makes the same run again.

    Args:
        only: options to write, under their names in `Config`; None: all.
    """
    lines = []
    for group in dataclasses.fields(Config):
        section = getattr(config, group.name)
        if not dataclasses.is_dataclass(section):
            continue
        options = [option.name for option in dataclasses.fields(section) if only is None or option.name in only]
        if options:
            lines.append(f"# {group.name}")
            lines += [f"{name.replace('_', '-')} = {_toml_value(getattr(section, name))}" for name in options]
            lines.append("")
    return "\n".join(lines)


def as_flag(name: str, value: Any) -> str:
    """Format an option as it is given on a command line.

    Args:
        name: of the flag, without dashes.
    """
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    if isinstance(value, (tuple, list)):
        return " ".join([f"--{name}", *map(str, value)])
    return f"--{name} {value if value != '' else repr('')}"


def _toml_value(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, str):  # JSON's escapes are TOML's, up to U+FFFF
        return '"' + "".join(json.dumps(c)[1:-1] if ord(c) <= 0xFFFF else f"\\U{ord(c):08x}" for c in value) + '"'
    return json.dumps(value)
