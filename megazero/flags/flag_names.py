"""Flags as a table, made from the dataclass tree of `config`; a configuration written as flags or as TOML."""

import dataclasses
import functools
import json
import shlex
import typing
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from megazero.engine.options.limits import Bounds
from megazero.flags.config import Config

# Flags that a search for a layout sets, in the order of a command line.
LAYOUT_FLAGS = (
    "tensor-model-parallel-size",
    "context-parallel-size",
    "pipeline-model-parallel-size",
    "expert-model-parallel-size",
    "expert-tensor-parallel-size",
    "pipeline-schedule",
    "virtual-pipeline-stages",
    "pipeline-split",
    "sequence-parallel",
    "zero-stage",
    "zero-shard-size",
    "recompute",
    "partition-activations",
    "checkpoint-in-cpu",
    "contiguous-checkpointing",
    "micro-batch-size",
)


class Flag(NamedTuple):
    """A flag of the command line, which is a field of a group of `Config`.

    Attributes:
        bounds: the values that it takes, if it takes a number.
    """

    group: str
    kind: Any
    default: Any
    bounds: Bounds | None


@functools.cache
def flags() -> Mapping[str, Flag]:
    """Return every flag except --preset, by its name without dashes."""
    found = {}
    for group, section in sections(Config()):
        hints = typing.get_type_hints(type(section))
        annotated = typing.get_type_hints(type(section), include_extras=True)
        for field in dataclasses.fields(section):
            extras = getattr(annotated[field.name], "__metadata__", ())
            bounds = next((extra for extra in extras if isinstance(extra, Bounds)), None)
            found[field.name.replace("_", "-")] = Flag(group, hints[field.name], field.default, bounds)
    return found


def sections(config: Config) -> list[tuple[str, Any]]:
    """Return the groups of flags: name -> dataclass."""
    groups = [(field.name, getattr(config, field.name)) for field in dataclasses.fields(config)]
    return [(name, section) for name, section in groups if dataclasses.is_dataclass(section)]


def value_of(config: Config, flag: str) -> Any:
    return getattr(getattr(config, flags()[flag].group), flag.replace("-", "_"))


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Return `config` with the values of some flags, given by their names without dashes, replaced."""
    groups: dict[str, dict[str, Any]] = {}
    for flag, value in values.items():
        groups.setdefault(flags()[flag].group, {})[flag.replace("-", "_")] = value
    sections = {group: dataclasses.replace(getattr(config, group), **changes) for group, changes in groups.items()}
    return dataclasses.replace(config, **sections)


def as_flag(name: str, value: Any) -> str:
    """Format a value as the command line spells it; `name` is without dashes."""
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    if isinstance(value, (tuple, list)):
        return " ".join([f"--{name}", *(shlex.quote(str(word)) for word in value)])
    return f"--{name} {shlex.quote(str(value))}"


def to_toml(config: Config, only: Collection[str] | None = None) -> str:
    """Format flags as a preset that makes the same run again. --preset itself is left out.

    Args:
        only: names of the flags to write, without dashes; None: all.
    """
    lines = []
    for group, _ in sections(config):
        names = [name for name, flag in flags().items() if flag.group == group and (only is None or name in only)]
        if names:
            lines += [f"# {group}", *(f"{name} = {toml_value(value_of(config, name))}" for name in names), ""]
    return "\n".join(lines)


def toml_value(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, str):  # JSON's escapes are TOML's, up to U+FFFF
        return '"' + "".join(json.dumps(c)[1:-1] if ord(c) <= 0xFFFF else f"\\U{ord(c):08x}" for c in value) + '"'
    return json.dumps(value)
