#!/usr/bin/env python3
"""List, verify, show, export, import and merge checkpoints: `megazero checkpoint`. `--help` has examples."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megazero.console.checkpoint_tool import COMMANDS, run_checkpoint_tool

__all__ = ["COMMANDS"]

if __name__ == "__main__":
    sys.exit(run_checkpoint_tool(sys.argv[1:]))
