#!/usr/bin/env python3
"""Generate text from a checkpoint of any layout: `megazero generate`. `--help` has examples."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megazero.console.commands import run_command

if __name__ == "__main__":
    sys.exit(run_command(["generate", *sys.argv[1:]]))
