#!/usr/bin/env python3
"""Generate text from a checkpoint of any layout: `megazero generate`. `--help` has examples."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megazero.console.generate_tool import GenerateOptions as Options
from megazero.console.generate_tool import run_generate

__all__ = ["Options"]

if __name__ == "__main__":
    run_generate(sys.argv[1:])
