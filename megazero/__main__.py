"""`python -m megazero` is the command `megazero`."""

import sys

from megazero.console.commands import run_command

if __name__ == "__main__":
    sys.exit(run_command())
