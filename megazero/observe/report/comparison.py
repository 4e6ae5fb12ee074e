"""The page of several runs: their curves on top of each other, their numbers, and the options in which they differ."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megazero.engine.options.option import Role
from megazero.files import read_toml
from megazero.flags.flag_names import flags_with
from megazero.observe.report.page import MEMORY, TRAFFIC, cards, option_text, render
from megazero.observe.report.runs import Run, read_run
from megazero.units import size, things

MISSING = "-"

Rows = list[tuple[str, list[str]]]


def comparison(folders: Sequence[Path], live: int = 0) -> str:
    """Return the page of several --log-dir folders.

    Args:
        live: seconds after which the page reloads itself until all runs are done; 0: never.

    Raises:
        ValueError: a folder holds no iteration.
    """
    runs = [read_run(folder) for folder in folders]
    names = run_names(runs)
    options = [given_options(run, folder) for run, folder in zip(runs, folders, strict=True)]
    places = flags_with(Role.PLACE)
    differing = [
        (f"--{name}", values) for name, values in _rows(options) if len(set(values)) > 1 and name not in places
    ]
    tables = {"Runs": _rows(dict(cards(run)) for run in runs), "Options that differ": differing}
    last = {
        "Memory of rank 0": _sizes(runs, "memory_bytes", MEMORY),
        "Traffic of rank 0 per iteration": _sizes(runs, "traffic_bytes", TRAFFIC),
    }
    return render(
        runs,
        names,
        live,
        name=", ".join(names),
        state=f"{sum(run.ended for run in runs)} of {things(len(runs), 'run')} have ended.",
        tables=[(title, names, rows) for title, rows in tables.items() if rows],
        last_tables=[(title, names, rows) for title, rows in last.items() if rows],
    )


def run_names(runs: Sequence[Run]) -> list[str]:
    """Return the names of the folders, numbered if several are equal."""
    names = [run.name for run in runs]
    return [name if names.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(names, 1)]


def given_options(run: Run, folder: Path) -> dict[str, str]:
    """Return all options of a run by flag; those of config.toml for a run of an older version, which has no others."""
    groups = run.start.get("config", {})
    found = {name: value for group in groups.values() if isinstance(group, dict) for name, value in group.items()}
    path = folder / "config.toml"
    if not found and path.is_file():
        found = read_toml(path)
    return {name.replace("_", "-"): option_text(value) for name, value in found.items()}


def _rows(columns: Iterable[Mapping[str, str]]) -> Rows:
    """Return the values of each name, in the order of their first appearance."""
    found = list(columns)
    names = dict.fromkeys(name for column in found for name in column)
    return [(name, [column.get(name, MISSING) for column in found]) for name in names]


def _sizes(runs: Sequence[Run], key: str, words: Mapping[str, str]) -> Rows:
    last: list[dict[str, Any]] = [run.records[-1].get(key) or {} for run in runs]
    return _rows({words.get(name, name): size(value) for name, value in each.items() if value} for each in last)
