#!/usr/bin/env python3
"""Pretrain a GPT model: alone, under torchrun or under srun. `--help` lists the flags.

`megazero train` where it is installed. Exit codes are in megazero/command/pretrain.py.
"""

import sys

from megazero.console.commands import run_command


def main(argv: list[str]) -> None:
    """Run a command line in this process. Errors are exceptions."""
    from megazero.command.pretrain import pretrain

    pretrain(argv)


def command() -> None:
    """Run as a program."""
    sys.exit(run_command(["train", *sys.argv[1:]]))


if __name__ == "__main__":
    command()
