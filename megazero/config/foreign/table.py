"""The table of foreign flags, read from the `.toml` files of this folder.

Note [sections of a table]: names are in kebab-case, without dashes, separated by spaces; * stands for any ending.
    no_equal: names of flags that are refused with the nearest of our flags.
    rename: our flag = names. The words stay.
    words, words_unless_given: words of ours = names of switches.
    choose.NAME: value = words of ours. Other values are refused.
    pairs.NAME: our flag = keys, of a flag with the value KEY=VALUE,KEY=VALUE.
    convert: result, for docs/results/flags.md = [names, function of `conversions`, order].
    only: reason or replacement = [names, value, ...]. These values need nothing; others are refused.
    unneeded: reason = names. They need nothing, whatever their values.
    refused: reason or replacement = names. They are refused unless they are switched off.
"""

from __future__ import annotations

import fnmatch
import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

FOLDER = Path(__file__).parent
FLAGS, DEEPSPEED_FILE = ("megatron", "deepspeed", "huggingface"), ("deepspeed_file",)
Kind = Literal["translated", "nothing to do", "refused"]


@dataclass(frozen=True)
class Foreign:
    """A flag of another system, or a key of its configuration file. A flag with the same name in both has no entry.

    Attributes:
        name: in kebab-case, without dashes; * stands for any ending.
        here: its translation, the reason why it needs nothing, or the replacement; for people.
        by: name of the function in `conversions` that translates it.
        argument: data for that function.
        order: entries of lower order are translated first, so that later ones see the results. The words of order 5
            go to the end of the command line, where they win.
    """

    name: str
    system: str
    kind: Kind
    here: str
    by: str
    argument: Any = field(default=None, compare=False)
    order: int = 0

    @property
    def spelled(self) -> str:
        """The flag as its system spells it."""
        return "--" + (self.name.replace("-", "_") if self.system == "Hugging Face" else self.name)


@functools.cache
def read_tables(*tables: str) -> dict[str, Foreign]:
    """Return the entries of TOML files by name."""
    return {entry.name: entry for table in tables for entry in read_table(table)}


def read_table(table: str) -> list[Foreign]:
    """Return the entries of a TOML file."""
    data = tomllib.loads((FOLDER / f"{table}.toml").read_text(encoding="utf-8"))
    system, entries = data.pop("system"), list[Foreign]()

    def add(names: str, kind: Kind, here: str, by: str, argument: Any = None, order: int = 0) -> None:
        entries.extend(Foreign(name, system, kind, here, by, argument, order) for name in names.split())

    for ours, names in data.pop("rename", {}).items():
        add(names, "translated", f"--{ours}", "rename", ours)
    for words, names in data.pop("words", {}).items():
        add(names, "translated", words, "switch", words)
    for words, names in data.pop("words_unless_given", {}).items():
        add(names, "translated", f"{words}, unless it is given", "switch_unless_given", words, 1)
    for name, choices in data.pop("choose", {}).items():
        here = "; ".join(f"{value}: {words}" for value, words in choices.items() if words)
        add(name, "translated", here, "choose", choices)
    for name, keys in data.pop("pairs", {}).items():
        ours_of = {key: ours for ours, names in keys.items() for key in names.split()}
        add(name, "translated", ", ".join(f"{key}: --{ours}" for key, ours in ours_of.items()), "pairs", ours_of)
    for here, (names, function, *order) in data.pop("convert", {}).items():
        add(names, "translated", here, function, None, *order)
    for why, (names, *values) in data.pop("only", {}).items():
        add(names, "nothing to do", f"{' or '.join(values)} alone: {why}", "only", (values, why))
    for why, names in data.pop("unneeded", {}).items():
        add(names, "nothing to do", why, "nothing")
    for why, names in data.pop("refused", {}).items():
        add(names, "refused", why, "refuse", why)
    add(data.pop("no_equal", ""), "refused", "no equal", "no_equal")
    assert not data, f"{table}.toml: unknown sections {', '.join(data)}"
    return entries


def find_entry(name: str, entries: Mapping[str, Foreign] | None = None) -> Foreign | None:
    """Return the entry of a name in kebab-case; a whole name goes before a pattern."""
    entries = read_tables(*FLAGS) if entries is None else entries
    name = name.lower()
    if name in entries:
        return entries[name]
    return next((entries[e] for e in entries if "*" in e and fnmatch.fnmatchcase(name, e)), None)
