#!/usr/bin/env python3
"""Prove that a layout trains the same model as one process: `megazero verify`. `--help` has examples."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megazero.console.commands import run_command

if __name__ == "__main__":
    sys.exit(run_command(["verify", *sys.argv[1:]]))
