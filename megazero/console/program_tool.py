"""The command `megazero program`, also scripts/print_program.py: the program of one rank."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megazero.engine.model.stage import declare
from megazero.engine.plan.program.operations import COMPUTE, Op, Start, Wait, name_of
from megazero.engine.plan.program.program import program
from megazero.engine.plan.program.rank_spec import rank_spec
from megazero.flags.cli import parse, read_own
from megazero.flags.help import until_reader_ends
from megazero.flags.resolve import resolve
from megazero.interop.huggingface.model_flags import find_model
from megazero.log import log


@dataclass(frozen=True)
class ProgramOptions:
    """Print the program of one rank: its training step, an operation a line.

    All other flags are those of pretrain_gpt.py. Needs no data and no other rank.

    example:
      python scripts/print_program.py --zero-stage 3 --num-layers 2 --vocab-size 50257 --world-size 2
    """

    world_size: int = 1
    """Ranks of the run."""
    rank: int = 0
    """Rank whose program is printed."""


def program_options(argv: list[str]) -> tuple[ProgramOptions, list[str]]:
    """Return the options of this program, and the flags of the run."""
    return read_own(ProgramOptions, argv, "scripts/print_program.py")


def print_program(argv: list[str]) -> int:
    """Print the step of the rank that the flags name, and return the exit code."""
    options, rest = program_options(argv)
    try:
        with until_reader_ends():
            print("\n".join(program_lines(rest, options.world_size, options.rank)))
    except ValueError as error:
        log.error(f"error: {error}")
        return 1
    return 0


def program_lines(flags: list[str], world_size: int, rank: int) -> list[str]:
    """Return the operations of a rank's step, a line each.

    Raises:
        ValueError: naming the flag that is wrong.
    """
    config, layout = resolve(parse(flags, find_model), world_size, 0, declare)
    if not 0 <= rank < world_size:
        raise ValueError(f"--rank {rank}: there are ranks 0 to {world_size - 1}; name one, or raise --world-size")
    spec = rank_spec(config, layout, layout.coord(rank).pp, declare)
    step = program(spec, config.schedule, config.micro_batches(layout.dp))
    return list(lines_of([*step.gradients, *step.update]))


def lines_of(ops: Iterable[Op]) -> Iterator[str]:
    """Yield a line per operation: computation on the left, memory in the middle, communication on the right."""
    for op in ops:
        if isinstance(op, (Start, Wait)):
            yield f"{'':34}{name_of(op)}"
        else:
            yield name_of(op) if isinstance(op, COMPUTE) else f"{'':17}{name_of(op)}"
