#!/usr/bin/env python3
"""Make the tables and pictures of docs/results/paper.md and plans.md.

Example: python -m benchmarks.reports.paper table-1 figure-6
"""

import importlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from benchmarks.reports.blocks import write_blocks

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
# section -> page, if it is not paper.md
PAGES = {"searches": "plans.md", "planned": "plans.md", "cards": "plans.md"}
# section -> the function that makes its blocks; pictures are in docs/pictures
SECTIONS = {
    "table-1": "states.table_1",
    "table-2": "states.table_2",
    "savings": "features.savings",
    "figure-6": "features.largest",
    "terms": "features.terms",
    "steps": "features.steps",
    "figure-4": "models.figure_4",
    "examples": "models.examples",
    "trained": "trained.small",
    "plan": "plans.picture",
    "schedules": "plans.schedules",
    "two-ranks": "trained.two_ranks",
    "searches": "searches.searches",
    "planned": "planned.planned",
    "cards": "cards.cards",
}


@dataclass(frozen=True)
class Options:
    """Make sections of docs/results/paper.md and plans.md."""

    sections: Annotated[tuple[str, ...], tyro.conf.Positional] = tuple(SECTIONS)
    """Sections to make again; all unless named."""


def main(options: Options) -> None:
    unknown = [name for name in options.sections if name not in SECTIONS]
    if unknown:
        sys.exit(f"{unknown[0]}: there is no such section, but {', '.join(SECTIONS)}")
    for name in options.sections:
        start = time.perf_counter()
        module, function = SECTIONS[name].split(".")
        write_blocks(
            RESULTS / PAGES.get(name, "paper.md"),
            getattr(importlib.import_module(f"benchmarks.reports.{module}"), function)(),
        )
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options))
