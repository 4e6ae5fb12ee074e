"""The table of foreign flags, read from the `.toml` files of this folder.

Note [sections of a table]: flags are separated by spaces, without dashes; * stands for any characters.
    rename: our flag = flags. The values stay.
    rename_with_experts: the same where there are experts; elsewhere, the flags need no translation.
    words, words_unless_given: words of ours = switches.
    choose.FLAG: value = words of ours. Other values are refused.
    pairs.FLAG: our flag = keys, if the value is KEY=VALUE,KEY=VALUE.
    convert: function of `conversions` = flags.
    only: values = flags. These values need no translation; others are refused.
    unneeded: subject = flags that need no translation, with any value.
    refused: replacement = flags. They are refused unless they are switched off.
    refused_with_experts: the same where there are experts; elsewhere, the flags need no translation.

A flag that is missing in the table is unknown: the answer names the nearest flags.

`values.toml` has values of flags that are ours too, by the names of our flags:
    value.FLAGS: our value, and further words of ours = values.
    answer.FLAGS: way out = values. They are refused.
"""

import fnmatch
import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent
FLAGS = ("retired", "megatron", "deepspeed", "huggingface")
DEEPSPEED_FILE = "deepspeed_file"  # keys of DeepSpeed's JSON file
VALUES = "values"  # of our own flags
DEFAULTS = "defaults"  # of flags that a script leaves out


class Foreign(NamedTuple):
    """A flag of another system, or a key of DeepSpeed's file. A flag that has the same name here has no entry.

    Attributes:
        name: as the other system spells it, without dashes.
        by: name of the function in `conversions` that translates it.
        argument: for that function.
        table: its TOML file, without .toml.
    """

    name: str
    by: str
    argument: Any
    table: str


def read_table(table: str) -> list[Foreign]:
    """Return the entries of a TOML file."""
    entries = list[Foreign]()
    for section, rows in tomllib.loads((FOLDER / f"{table}.toml").read_text(encoding="utf-8")).items():
        for key, value in rows.items():
            if isinstance(value, dict):
                entries.append(Foreign(key, section, value, table))
            elif section == "convert":
                entries += [Foreign(name, key, None, table) for name in value.split()]
            else:
                entries += [Foreign(name, section, key, table) for name in value.split()]
    return entries


@functools.cache
def read_tables() -> Mapping[str, Foreign]:
    """Return all entries by name in kebab-case. A key of DeepSpeed's file has a name that begins with "file."."""
    found = {kebab(entry.name): entry for table in FLAGS for entry in read_table(table)}
    return found | {kebab(f"file.{entry.name}"): entry for entry in read_table(DEEPSPEED_FILE)}


class Value(NamedTuple):
    """A value that another system has for a flag of ours, in lower case and kebab-case.

    Attributes:
        words: our value, and further words of ours; empty if the value is refused.
        answer: why it is refused, or the way out.
    """

    name: str
    words: str
    answer: str


@functools.cache
def read_values() -> Mapping[str, tuple[Value, ...]]:
    """Return other systems' values of our flags, by the flag's name without dashes."""
    found = dict[str, tuple[Value, ...]]()
    for section, tables in tomllib.loads((FOLDER / f"{VALUES}.toml").read_text(encoding="utf-8")).items():
        for names, rows in tables.items():
            values = tuple(
                Value(kebab(theirs), ours, "") if section == "value" else Value(kebab(theirs), "", ours)
                for ours, several in rows.items()
                for theirs in several.split()
            )
            found |= {name: (*found.get(name, ()), *values) for name in names.split()}
    return found


@functools.cache
def retired() -> Mapping[str, str]:
    """Return our flags of earlier versions, without dashes, with their replacements."""
    return {entry.name: entry.argument for entry in read_table("retired")}


def kebab(name: str) -> str:
    return name.replace("_", "-")


def find_entry(name: str) -> Foreign | None:
    """Return the entry of a name in kebab-case. A whole name goes before a pattern."""
    entries, name = read_tables(), name.lower()
    patterns = (entry for pattern, entry in entries.items() if "*" in pattern and fnmatch.fnmatchcase(name, pattern))
    return entries[name] if name in entries else next(patterns, None)
