#!/usr/bin/env python3
"""Write report.html into log folders of runs: `megazero report`. `--help` has an example."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megazero.console.report_tool import ReportOptions as Options
from megazero.console.report_tool import write_reports

__all__ = ["Options"]

if __name__ == "__main__":
    sys.exit(write_reports(sys.argv[1:]))
