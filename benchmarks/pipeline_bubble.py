#!/usr/bin/env python3
"""The measured bubble of every pipeline schedule next to the simulated one.

Real ranks run the real program; blocks sleep a known time instead of computing, so that more ranks than cores measure
the schedule and not the machine. A forward, an input gradient and a weight gradient take one sleep each. The time
is that from the first computation to the last, over the computing time of the busiest rank. Example:

    python benchmarks/pipeline_bubble.py --ranks 4 --micro-batches 8 --milliseconds 30
"""

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


from benchmarks.processes import Job, alive, isolate
from megazero.engine.plan.schedule.schedules import SCHEDULES
from tests.helpers.asleep import Work, asleep


class System:
    label = "megazero, blocks asleep"
    make = staticmethod(asleep)


SYSTEMS = {"asleep": System}


@dataclass(frozen=True)
class Options:
    """The measured bubble of every pipeline schedule next to the simulated one."""

    ranks: int = 4
    """Pipeline ranks."""
    micro_batches: int = 8
    """Per step."""
    milliseconds: float = 30.0
    """One sleep: a third of the work of a block."""
    steps: int = 3
    """Measured steps of each schedule; the median counts. One more warms up."""
    schedules: tuple[str, ...] = tuple(SCHEDULES)
    """The schedules to measure."""


def measured_bubble(ranks: list[dict[str, Any]]) -> float:
    """Idle over computing time of the busiest rank, from the first computation to the last."""
    times = [[(begin, end) for _, begin, end in rank["spans"]] for rank in ranks]
    whole = max(end for rank in times for _, end in rank) - min(begin for rank in times for begin, _ in rank)
    return whole / max(sum(end - begin for begin, end in rank) for rank in times) - 1


def main(options: Options) -> None:
    from rich.console import Console
    from rich.table import Table

    isolate()
    table = Table(title=f"{options.ranks} ranks, {options.micro_batches} micro-batches")
    for column in ("schedule", "bubble simulated", "bubble measured", "measured / simulated"):
        table.add_column(column, justify="right")
    for schedule in options.schedules:
        work = Work(schedule, options.ranks, options.micro_batches, options.milliseconds / 1000)
        wanted, found = work.simulated(), []
        with alive([Job("asleep", work, "benchmarks.pipeline_bubble")]) as (system,):  # type: ignore[arg-type]
            system.ask("build")
            for _ in range(options.steps + 1):
                system.ask("timed", 1)
                found.append(measured_bubble(system.ask("check")))
        bubble = statistics.median(found[1:])
        table.add_row(schedule, f"{wanted.bubble:.3f}", f"{bubble:.3f}", f"{bubble / wanted.bubble:.2f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Options, description=__doc__))
