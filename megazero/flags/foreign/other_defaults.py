"""The flags that a script of another system leaves out, and that have other values there than here. Pure."""

import functools
import tomllib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from megazero.flags.config import Config
from megazero.flags.flag_names import value_of
from megazero.flags.foreign.flag_table import DEFAULTS, FOLDER, find_entry

SHARED = ("bf16", "fp16")  # flags of Hugging Face's Trainer too


@functools.cache
def read_defaults() -> Mapping[str, Mapping[str, Any]]:
    """Return the rows of each system. A row that is a table of rows has a condition for its name."""
    return tomllib.loads((FOLDER / f"{DEFAULTS}.toml").read_text(encoding="utf-8"))


def systems(foreign: Collection[str]) -> list[str]:
    """Return the systems of foreign flags, which are kebab-case names; a later one overrides the values of an earlier.

    DeepSpeed runs scripts of both others, and the flags of Megatron-LM's scripts are mostly ours.
    """
    tables = [entry.table for name in foreign if name not in SHARED and (entry := find_entry(name))]
    if not tables and not any(name.startswith("file.") for name in foreign):
        return []
    trainer = tables.count("huggingface") > tables.count("megatron")
    found = ["Hugging Face" if trainer else "Megatron-LM"]
    return [*found, "DeepSpeed"] if any(name.startswith("file.") for name in foreign) else found


def left_out(foreign: Collection[str], config: Config, given: Collection[str]) -> str:
    """Return a line for the flags that are not given and have another value in the system of the command line.

    Args:
        foreign: flags of other systems on the command line, and keys of its DeepSpeed file, as `find_entry` takes them.
        config: with the defaults of the device.
        given: flags of ours, without dashes, that the command line, its preset or a config.json sets.

    Returns:
        The line; empty without foreign flags, and if the run trains nothing.
    """
    theirs = dict[str, tuple[str, Any]]()
    for system in systems(foreign) if config.trains else []:
        theirs |= {name: (system, value) for name, value in _rows(system, foreign, config)}
    found = dict[str, list[str]]()
    for name, (system, there) in theirs.items():
        if isinstance(there, dict):
            shown, differs, there = f"{name} {there['here']}", there["given"] not in foreign, there["there"]
        else:
            shown, here = f"--{name} {short_value(value_of(config, name))}", value_of(config, name)
            differs = name not in given and here != there
        if differs:
            found.setdefault(system, []).append(f"{shown} ({short_value(there)} there)")
    parts = [f"different in {system}: {', '.join(rows)}" for system, rows in found.items()]
    return f"not given, and {'; '.join(parts)}" if parts else ""


def _rows(system: str, foreign: Collection[str], config: Config) -> Iterator[tuple[str, Any]]:
    for name, value in read_defaults()[system].items():
        if not isinstance(value, dict) or "here" in value:
            yield name, value
        elif name.startswith("file."):
            yield from value.items() if any(key.startswith(name) for key in foreign) else ()
        else:
            flag, _, wanted = name.partition(" ")
            yield from value.items() if str(value_of(config, flag)) == wanted else ()


def short_value(value: Any) -> str:
    """Format a value of a flag: 0.1, yes, 2^32."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float) and value >= 65536 and value == int(value) and int(value).bit_count() == 1:
        return f"2^{int(value).bit_length() - 1}"
    return f"{value:g}" if isinstance(value, float) else str(value)
