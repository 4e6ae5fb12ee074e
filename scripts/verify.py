#!/usr/bin/env python3
"""Prove that a layout trains the same model as one process: `megazero verify`. `--help` has examples."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megazero.verify.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
