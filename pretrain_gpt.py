#!/usr/bin/env python3
"""Pretrain a GPT model: alone, under torchrun or under srun. `--help` lists the flags.

`megazero train` where it is installed. Exit codes are in megazero/command/pretrain.py.
"""

from megazero.command.pretrain import pretrain as main
from megazero.command.pretrain import run_pretrain as command

__all__ = ["command", "main"]

if __name__ == "__main__":
    command()
