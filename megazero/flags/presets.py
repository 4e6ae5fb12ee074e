"""Presets: TOML files of flags, such as scripts/presets/tiny.toml or the config.toml of an earlier run."""

import json
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from megazero.families import FAMILIES
from megazero.files import read_toml
from megazero.flags.config import Config
from megazero.flags.flag_names import flags, with_values
from megazero.flags.foreign.flag_table import retired
from megazero.units import did_you_mean

PRESETS = Path(__file__).parent / "presets"  # a link to scripts/presets; files of the package where it is installed


class Preset(NamedTuple):
    """The contents of a preset.

    Attributes:
        values: by the names of the flags, without dashes.
        notes: a line for each retired flag, which is ignored.
    """

    values: dict[str, Any]
    notes: list[str]


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def preset_values(name: str) -> dict[str, Any]:
    return read_preset(name).values


def over_defaults(values: Mapping[str, Any], architecture: str = "") -> Config:
    """Return the configuration of flags over the defaults of an architecture, by default that which they name."""
    family = FAMILIES.get(architecture or values.get("architecture", ""))  # the parser refuses another name
    given = {name: value for name, value in values.items() if (name, value) != ("activation", "auto")}
    return with_values(Config(), (family.defaults if family else {}) | given)


def read_preset(name: str) -> Preset:
    """Read a preset, given by its path or by its name in scripts/presets.

    Raises:
        ValueError: there is none of that name; it is not TOML; it has an unknown key, or a value of the wrong type.
    """
    path = _find(name)
    try:
        content = read_toml(path)
    except ValueError as error:
        raise ValueError(f"--preset {error}") from None
    notes = [f"--preset {path}: {key} is ignored: {retired()[key]}" for key in content if key in retired()]
    kept = {key: value for key, value in content.items() if key not in retired()}
    return Preset(typed_values(kept, f"--preset {path}"), notes)


def typed_values(content: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return parsed TOML as values of flags, by their names.

    Raises:
        ValueError: a key is no flag, or a value is of another type; names `source`.
    """
    known, values = flags(), {}
    for key, value in content.items():
        if key not in known:
            hint = did_you_mean(key, known) or "see --help for the flags"
            raise ValueError(f"{source}: unknown key {key!r}; {hint}")
        try:
            values[key] = _convert(value, known[key].kind)
        except msgspec.ValidationError as error:
            raise ValueError(f"{source}: {key} = {json.dumps(value, default=str)}: {error}") from None
    return values


def _convert(value: Any, kind: Any) -> Any:
    """Return a TOML value as the type of its flag. A list of strings may hold numbers too, or be a single string."""
    if kind == tuple[str, ...]:
        items = value if isinstance(value, list) else [value]
        value = [str(item) if type(item) in (int, float) else item for item in items]
    if typing.get_origin(kind) is Literal and value not in typing.get_args(kind):
        raise msgspec.ValidationError(f"Expected one of {', '.join(map(str, typing.get_args(kind)))}")
    return msgspec.convert(value, kind)


def _find(name: str) -> Path:
    for path in (Path(name), PRESETS / f"{name}.toml", PRESETS / name):
        if path.is_file():
            return path
    known = preset_names()
    hint = did_you_mean(Path(name).name.removesuffix(".toml"), known) or f"there are {', '.join(known)}"
    raise ValueError(f"--preset {name}: no such file, nor a preset; {hint}")
