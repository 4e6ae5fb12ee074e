"""Generate the lists of docs/results/flags.md: the flags of other systems, and how many of public scripts are accepted;
and the table of other defaults in docs/megatron.md.

python -m benchmarks.reports.foreign
"""

import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.reports.blocks import markdown, write_blocks
from megazero.engine.model.stage import declare
from megazero.flags.cli import parse
from megazero.flags.config import CheckpointConfig, DataConfig, LogConfig
from megazero.flags.flag_names import flags
from megazero.flags.foreign.flag_table import FLAGS, Foreign, kebab, read_table, read_values
from megazero.flags.foreign.other_defaults import read_defaults, short_value
from megazero.flags.foreign.translate import Answer, Translated, is_ours, split_items, translate
from megazero.flags.foreign.value_conversions import CONVERSIONS, model_types
from megazero.flags.help import FAMILY, help_of
from megazero.flags.resolve import resolve

PAGE = Path(__file__).parents[2] / "docs" / "results" / "flags.md"
SCRIPTS = Path(__file__).with_name("foreign_scripts.toml")
DEFAULTS_PAGE = PAGE.parents[1] / "megatron.md"
CONDITIONS = {"file.optimizer": "`optimizer` in its file", "file.scheduler": "`scheduler` in its file"}
RANKS = 64  # of the runs in the table of scripts: gradient accumulation depends on data-parallel ranks


class Script(NamedTuple):
    """A public script: its name, where it is, its flags, and its DeepSpeed file."""

    name: str
    source: str
    flags: str
    deepspeed: str = ""


def read_scripts() -> list[Script]:
    return [Script(**fields) for fields in tomllib.loads(SCRIPTS.read_text(encoding="utf-8"))["script"]]


def translated(script: Script) -> Translated:
    """Translate the flags of a script; the words FILE stand for its DeepSpeed file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "ds.json"
        file.write_text(script.deepspeed)
        argv = [word.replace("FILE", str(file)) if script.deepspeed else word for word in script.flags.split()]
        return translate(argv, count_ranks=lambda: RANKS)


def answers(script: Script) -> tuple[int, tuple[Answer, ...]]:
    """Return the number of a script's flags that are ours too, and the answers to the others."""
    found = translated(script).answers
    ours = sum(is_ours(item.name) for item in split_items(script.flags.split()))
    return ours - sum(is_ours(answer.item.name) for answer in found), found


def complaint(script: Script) -> str:
    """Return the error of a run with the accepted flags; empty if it starts."""
    config = parse(translated(script).args)
    ranks = config.parallel.tensor_model_parallel_size * config.parallel.pipeline_model_parallel_size
    config = replace(config, data=DataConfig(), checkpoint=CheckpointConfig(), log=LogConfig())  # files are missing
    try:
        resolve(config, ranks, 50257, declare)
    except ValueError as error:
        return str(error)
    return ""


def script_table() -> str:
    """Format, per script, how many of its flags are accepted, translated, without anything to do, and refused."""
    rows = []
    for script in read_scripts():
        same, found = answers(script)
        done = [answer for answer in found if not answer.refusal]
        translations = sum(bool(answer.words) for answer in done)
        counts = same, translations, len(done) - translations, len(found) - len(done)
        rows.append((f"[{script.name}]({script.source})", *counts))
    return markdown(("script", "accepted as is", "translated", "nothing to do", "refused"), rows)


def result(entry: Foreign) -> str:
    """Return the translation of an entry, or its replacement; empty if there is nothing to do."""
    argument: Any = entry.argument
    match entry.by:
        case "rename" | "rename_with_experts":
            return f"--{argument}"
        case "words" | "refused" | "refused_with_experts":
            return str(argument)
        case "words_unless_given":
            return f"{argument}, unless it is given"
        case "choose" | "model_type":
            choices = argument or model_types()
            return "; ".join(f"{value}: {words}" for value, words in choices.items() if words)
        case "pairs":
            return "; ".join(f"{', '.join(keys.split())}: --{ours}" for ours, keys in argument.items())
        case "only":
            return f"{' or '.join(argument.split())} alone"
    return (CONVERSIONS[entry.by].__doc__ or "").partition("\n")[0]


def flag_list(entries: list[Foreign]) -> str:
    """Format entries, those with one result in one line. A flag that is ours by now is left out."""
    lines: dict[str, list[str]] = {}
    for entry in entries:
        if kebab(entry.name) not in flags():
            lines.setdefault(result(entry), []).append(f"`--{entry.name}`")
    return "\n".join(f"- {', '.join(names)}{here and f': {here}'}" for here, names in lines.items())


def value_list() -> str:
    """Format other systems' values of our flags, those with one result in one line."""
    lines: dict[str, dict[str, None]] = {}
    for name, rows in read_values().items():
        for row in rows:
            here = f"--{name} {row.words}" if row.words else row.answer
            lines.setdefault(here, {})[f"`--{name} {row.name}`"] = None
    return "\n".join(f"- {', '.join(names)}: {here}" for here, names in lines.items())


def family_table() -> str:
    """Format the flags that no help lists: flag, default and meaning."""
    rows = ((f"`--{name}`", str(flags()[name].default), help_of(name)) for name in FAMILY)
    return markdown(("flag", "default", "meaning"), list(rows))


def default_table() -> str:
    """Format the values that other systems take for flags that are not given, and ours."""
    tables, rows, differing = read_defaults(), dict[str, dict[str, str]](), set[str]()
    for system, table in tables.items():
        for name, value in table.items():
            part = value if isinstance(value, dict) and "here" not in value else {name: value}
            when = "" if name in part else f" ({CONDITIONS.get(name, f'--{name}')})"
            for flag, there in part.items():
                here = there["here"] if isinstance(there, dict) else short_value(flags()[flag].default)
                there = there["there"] if isinstance(there, dict) else short_value(there)
                shown = f"`--{flag}`" if flag in flags() else flag
                row = rows.setdefault(shown, {"here": here})
                differing |= {shown} if there != here else set()
                row[system] = ", ".join(filter(None, (row.get(system, ""), f"{there}{when}")))
    cells = [
        (flag, *(row.get(system, "") for system in tables), row["here"])
        for flag, row in rows.items()
        if flag in differing
    ]
    return markdown(("flag", *tables, "here"), cells)


def blocks() -> Iterator[tuple[str, str]]:
    """Yield the names of the page's blocks, and their texts."""
    yield "scripts", script_table()
    entries = [entry for table in FLAGS if table != "retired" for entry in read_table(table)]
    needless, refused = ("only", "unneeded"), ("refused", "refused_with_experts")
    yield "translated", flag_list([entry for entry in entries if entry.by not in needless + refused])
    yield "values", value_list()
    yield "nothing to do", flag_list([entry for entry in entries if entry.by in needless])
    yield "refused", flag_list([entry for entry in entries if entry.by in refused])
    yield "family", family_table()


if __name__ == "__main__":
    write_blocks(PAGE, dict(blocks()))
    write_blocks(DEFAULTS_PAGE, {"defaults": default_table()})
    print(PAGE, DEFAULTS_PAGE)
