#!/usr/bin/env python3
"""Write report.html of a run, or one page of several, or serve it: `megazero report`. `--help` has examples."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megazero.observe.report.report_command import ReportOptions as Options
from megazero.observe.report.report_command import write_reports

__all__ = ["Options"]

if __name__ == "__main__":
    sys.exit(write_reports(sys.argv[1:]))
