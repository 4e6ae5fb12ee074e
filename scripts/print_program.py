#!/usr/bin/env python3
"""Print the program of one rank, its training step: `megazero program`. `--help` has an example."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megazero.console.commands import run_command

if __name__ == "__main__":
    sys.exit(run_command(["program", *sys.argv[1:]]))
