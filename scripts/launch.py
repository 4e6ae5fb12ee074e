"""Start the ranks of a program, for scripts/launch.sh: launch.py PROGRAM WORDS OF launch.sh."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megazero.cluster.launcher import launch_ranks_here

if __name__ == "__main__":
    sys.exit(launch_ranks_here(sys.argv[2:], [sys.argv[1]]))
