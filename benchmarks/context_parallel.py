#!/usr/bin/env python3
"""Context parallelism of a stack of transformer blocks, on CPUs: side by side in one run.

megazero, by all-gather and in a ring, against torch's ring attention on as many ranks (`stacks.ring` describes it), and
against megazero's tensor parallelism with sequence parallelism. Before anything is timed, every system's output and
gradients have to agree with whole plain blocks.

All systems multiply with torch's own products. Turns and intervals are as in `zero.py`. Examples:

    python benchmarks/context_parallel.py
    python benchmarks/context_parallel.py --ranks 4
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.processes import Job, alive, isolate, quotients, shown, take_turns
from benchmarks.stacks import SYSTEMS, Work
from benchmarks.tensor_parallel import VOCABULARY, agree


@dataclass(frozen=True)
class Options:
    """Context parallelism on CPUs."""

    layers: int = 2
    hidden: int = 256
    heads: int = 4
    seq_length: int = 4096
    batch: int = 1
    ranks: int = 2
    rounds: int = 10
    """Turns of every system."""
    steps: int = 2
    """Steps of a turn."""
    quick: bool = False
    """A smoke run of a tiny shape."""

    def shape(self) -> tuple[int, ...]:
        if self.quick:
            return 2, 64, 4, 32, VOCABULARY, 2
        return self.layers, self.hidden, self.heads, self.seq_length, VOCABULARY, self.batch


def jobs(options: Options) -> list[Job]:
    """The first is the one that the others are compared with."""
    work = Work(*options.shape(), options.ranks, "fp32")
    names = ("ring", "megazero-gathered", "megazero-ring", "megazero/torch-sharded")
    return [Job(name, work, "benchmarks.stacks") for name in names]


def measure(options: Options) -> dict[str, dict[str, Any]]:
    rounds, steps = (2, 1) if options.quick else (options.rounds, options.steps)
    isolated = isolate()
    with alive(jobs(options)) as systems:
        gaps = agree(systems)
        take_turns(systems, 1, 1 if options.quick else 3, isolated)  # warms up
        found = take_turns(systems, rounds, steps, isolated)
    for name, gap in gaps.items():
        found[name]["gaps"] = gap
    return found


def show(found: dict[str, dict[str, Any]], options: Options, console: Console) -> None:
    layers, hidden, heads, length, _, batch = options.shape()
    table = Table(
        title=f"{layers} layers, hidden {hidden}, {heads} heads, {batch} x {length} tokens on {options.ranks} ranks"
    )
    for column in ("system", "ms", "speed over torch's", "speed over tp + sp", "MB sent", "gap"):
        table.add_column(column, justify="left" if column == "system" else "right")
    base, tensor = (found[name]["seconds"] for name in ("ring", "megazero/torch-sharded"))
    for name, it in found.items():
        table.add_row(
            SYSTEMS[name].label if name != "megazero/torch-sharded" else "megazero, tp and sp",
            shown([1000 * s for s in it["seconds"]], 0),
            shown(quotients(base, it["seconds"]), 2) if name != "ring" else "",
            shown(quotients(tensor, it["seconds"]), 2) if name != "megazero/torch-sharded" else "",
            f"{sum(it['wire']) / len(it['wire']) / 1e6:.1f}" if it["wire"] else "not measured",
            f"{max(it['gaps'].values()):.0e}",
        )
    console.print(table)


def main(options: Options) -> None:
    show(measure(options), options, Console(width=150 if not sys.stdout.isatty() else None))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
