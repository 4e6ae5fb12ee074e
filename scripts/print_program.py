#!/usr/bin/env python3
"""Print the program of one rank: its training step, an operation a line.

    python scripts/print_program.py --zero-stage 3 --num-layers 2 --vocab-size 50257 --world-size 2

The flags are those of pretrain_gpt.py, and --world-size N and --rank R.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megazero.engine.model.stage import declare
from megazero.engine.plan.program.program import program, text
from megazero.engine.plan.program.rank_spec import rank_spec
from megazero.flags.cli import parse
from megazero.flags.resolve import resolve
from megazero.interop.huggingface.model_flags import find_model


def main(argv: list[str]) -> None:
    """Print the step of the rank that the flags name.

    Raises:
        ValueError: naming the flag that is wrong.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0)
    options, rest = parser.parse_known_args(argv)
    world_size, rank = options.world_size, options.rank
    config, layout = resolve(parse(rest, find_model), world_size, 0, declare)
    if not 0 <= rank < world_size:
        raise ValueError(f"--rank {rank}: there are ranks 0 to {world_size - 1}; name one, or raise --world-size")
    spec = rank_spec(config, layout, layout.coord(rank).pp, declare)
    step = program(spec, config.schedule, config.micro_batches(layout.dp))
    print("\n".join(text([*step.gradients, *step.update])))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"error: {error}")
    except BrokenPipeError:  # a reader such as head has seen enough
        sys.stderr.close()
