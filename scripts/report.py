#!/usr/bin/env python3
"""Write report.html of a run, or one page of several, or serve it: `megazero report`. `--help` has examples."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megazero.console.commands import run_command

if __name__ == "__main__":
    sys.exit(run_command(["report", *sys.argv[1:]]))
