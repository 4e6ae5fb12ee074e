#!/usr/bin/env python3
"""Write report.html into log folders of runs: curves, layout, memory, throughput, configuration, environment.

A run writes its own at its end; this makes it for one that still runs, was killed, or is older. Example:

    python scripts/report.py runs/a runs/b
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megazero.observe.report.page import write_report
from megazero.optional import missing_package


@dataclass(frozen=True)
class Options:
    """Write report.html into log folders of runs: one file each, that needs no network."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """The --log-dir folders."""


def main(options: Options) -> None:
    if not options.runs:
        raise ValueError("no run is named; give the --log-dir folder of one or more")
    for folder in options.runs:
        try:
            print(f"wrote {write_report(folder)}")
        except OSError as error:
            raise ValueError(f"{folder}: the report cannot be written: {error.strerror}") from None


if __name__ == "__main__":
    try:
        main(tyro.cli(Options))
    except ModuleNotFoundError as error:
        sys.exit(f"this {missing_package(error)}")
    except ValueError as error:
        sys.exit(f"error: {error}")
