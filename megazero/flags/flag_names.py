"""Flags as a table, made from the dataclass tree of `config`; a configuration written as flags or as TOML."""

import dataclasses
import functools
import json
import shlex
import typing
from collections.abc import Collection, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar

from megazero.engine.options.option import Bounds, OnResume, Role
from megazero.flags.config import Config

Fact = TypeVar("Fact")


class Flag(NamedTuple):
    """A flag of the command line, which is a field of a group of `Config`.

    Attributes:
        group: empty for a field of `Config` itself.
        facts: metadata of the field (`engine.options.option`), and the group's consequence on a resume behind its own.
    """

    group: str
    kind: Any
    default: Any
    facts: tuple[Any, ...]

    def all(self, kind: type[Fact]) -> list[Fact]:
        return [fact for fact in self.facts if isinstance(fact, kind)]

    def first(self, kind: type[Fact]) -> Fact | None:
        return next(iter(self.all(kind)), None)

    @property
    def bounds(self) -> Bounds | None:
        """The values that it takes, if it takes a number."""
        return self.first(Bounds)

    @property
    def on_resume(self) -> OnResume:
        return self.first(OnResume) or OnResume.NOTED


@functools.cache
def flags() -> Mapping[str, Flag]:
    """Return every flag except --preset and --hf-config, by its name without dashes."""
    found = dict[str, Flag]()
    for group, section in sections(Config()):
        found |= _fields(type(section), group, getattr(section, "on_resume", OnResume.NOTED))
    return found


@functools.cache
def all_flags() -> Mapping[str, Flag]:
    """Return every flag by its name without dashes."""
    return {**_fields(Config, "", OnResume.UNSAID), **flags()}


def _fields(kind: type, group: str, on_resume: OnResume) -> dict[str, Flag]:
    """Return the fields of a dataclass that are no groups."""
    hints, found = typing.get_type_hints(kind, include_extras=True), dict[str, Flag]()
    for field in dataclasses.fields(kind):
        if field.default is not dataclasses.MISSING:
            hint = hints[field.name]
            plain = typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
            facts = (*getattr(hint, "__metadata__", ()), on_resume)
            found[field.name.replace("_", "-")] = Flag(group, plain, field.default, facts)
    return found


@functools.cache
def flags_with(fact: Any) -> tuple[str, ...]:
    """Return the flags with a fact, such as a role, by their names without dashes."""
    return tuple(name for name, flag in flags().items() if fact in flag.facts)


def sections(config: Config) -> list[tuple[str, Any]]:
    """Return the groups of flags: name -> dataclass."""
    groups = [(field.name, getattr(config, field.name)) for field in dataclasses.fields(config)]
    return [(name, section) for name, section in groups if dataclasses.is_dataclass(section)]


def value_of(config: Config, flag: str) -> Any:
    group = all_flags()[flag].group
    return getattr(getattr(config, group) if group else config, flag.replace("-", "_"))


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Return `config` with the values of some flags, given by their names without dashes, replaced."""
    groups: dict[str, dict[str, Any]] = {}
    for flag, value in values.items():
        groups.setdefault(all_flags()[flag].group, {})[flag.replace("-", "_")] = value
    own = groups.pop("", {})
    sections = {group: dataclasses.replace(getattr(config, group), **changes) for group, changes in groups.items()}
    return dataclasses.replace(config, **sections, **own)


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


# In the order of a command line: the batch is last.
LAYOUT_FLAGS = tuple(sorted(flags_with(Role.LAYOUT), key=lambda name: flags()[name].group == "training"))
