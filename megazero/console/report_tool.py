"""The command `megazero report`, also scripts/report.py: report.html of log folders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from megazero.flags.cli import read_flags
from megazero.log import log
from megazero.observe.report.page import write_report
from megazero.optional import missing_package


@dataclass(frozen=True)
class ReportOptions:
    """Write report.html into log folders of runs: one file each, that needs no network.

    A run writes its own at its end; this makes it for one that still runs, was killed, or is older.

    example:
      python scripts/report.py runs/a runs/b
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """The --log-dir folders."""


def write_reports(argv: list[str]) -> int:
    """Run a command line, and return the exit code."""
    options = read_flags(ReportOptions, argv, "scripts/report.py")
    try:
        if not options.runs:
            raise ValueError("no run is named; give the --log-dir folder of one or more")
        for folder in options.runs:
            try:
                print(f"wrote {write_report(folder)}")
            except OSError as error:
                raise ValueError(f"{folder}: the report cannot be written: {error.strerror}") from None
    except ModuleNotFoundError as error:
        log.error(f"this {missing_package(error)}")
        return 1
    except ValueError as error:
        log.error(f"error: {error}")
        return 1
    return 0
