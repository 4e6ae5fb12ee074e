#!/usr/bin/env python3
"""Write report.html of a run, or one page that compares several, or serve it: curves, numbers, options. Examples:

python scripts/report.py runs/a
python scripts/report.py runs/a runs/b --output comparison.html
python scripts/report.py runs/a runs/b --serve
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megazero.observe.report.report_command import ReportOptions as Options
from megazero.observe.report.report_command import write_reports

__all__ = ["Options"]

if __name__ == "__main__":
    sys.exit(write_reports(sys.argv[1:]))
