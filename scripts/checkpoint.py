#!/usr/bin/env python3
"""List, verify, show, export, import and merge checkpoints: `megazero checkpoint`. `--help` has examples."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megazero.console.commands import run_command

if __name__ == "__main__":
    sys.exit(run_command(["checkpoint", *sys.argv[1:]]))
