#!/usr/bin/env python3
"""Prove that a layout trains the same model as one process; also installed as megazero-verify. `--help` has examples.

python scripts/verify.py --preset zero-100b --world-size 400
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megazero.verify.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
