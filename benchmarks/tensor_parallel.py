#!/usr/bin/env python3
"""megazero's tensor parallelism against torch's DTensor: a stack of transformer blocks, side by side in one run.

`stacks.py` defines a step and the systems. Two shapes: the one that the options name, and one so narrow
(`--no-narrow` leaves it out) that communication is a third of the step or more. Each with the stream between blocks
whole on every rank, and sharded (sequence parallelism). Before anything is timed, every system's output, input gradient
and weight gradients have to agree with whole plain blocks.

Turns, intervals and CPU ms are as in `zero.py`. Further results:

- communication: 1 - (step without communication) / step, of neighbouring turns; its collectives answer at once.
- of half alone: a step against half of the step of one process that does all of it with one thread: 1 is perfect.

On a CPU with AVX-512 megazero's fp32 products are oneDNN's, faster than torch's own (MKL's): there it runs with both,
to show the effect of tensor parallelism alone. Examples:

    python benchmarks/tensor_parallel.py --json tensor_parallel.json
    python benchmarks/tensor_parallel.py --layers 2 --hidden 1024 --heads 16 --no-narrow --streams sharded
"""

import dataclasses
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.processes import Job, Processes, alive, isolate, quotients, shown, take_turns
from benchmarks.stacks import SYSTEMS, Work
from megazero.torch_private import has_onednn

GAP = 1e-4  # relative L2 distance from plain blocks
VOCABULARY = 128  # megazero's model has a token table, frozen and never looked up


@dataclass(frozen=True)
class Options:
    """megazero's tensor parallelism against torch's DTensor."""

    layers: int = 4
    hidden: int = 512
    heads: int = 8
    seq_length: int = 128
    batch: int = 4
    narrow: bool = True
    """Measure the narrow shape too: 8 layers, hidden 256, 4 heads, sequence 128, batch 1."""
    ranks: int = 2
    """Tensor-parallel ranks; on GPUs, one each."""
    streams: tuple[Literal["whole", "sharded"], ...] = ("whole", "sharded")
    """Stream between blocks; sharded is sequence parallelism."""
    products: tuple[Literal["own", "torch"], ...] = ("own", "torch")
    """megazero's matrix products; on a GPU, and on a CPU without AVX-512, they are torch's anyway."""
    shares: bool = True
    """Run every system without communication too, and as one process."""
    rounds: int = 12
    """Turns of every system."""
    steps: int = 4
    """Steps of a turn."""
    json: str = ""
    """FILE for all that was measured."""
    quick: bool = False
    """A smoke run: a tiny shape, its stream sharded, two rounds, megazero's own products."""

    def works(self) -> dict[str, Work]:
        shape = (self.layers, self.hidden, self.heads, self.seq_length, VOCABULARY, self.batch)
        works = {describe(shape): Work(*shape, self.ranks, "fp32")}
        if self.narrow:
            narrow = (8, 256, 4, 128, VOCABULARY, 1)
            works[describe(narrow)] = Work(*narrow, self.ranks, "fp32")
        return works


def describe(shape: tuple[int, ...]) -> str:
    layers, hidden, heads, seq_length, _, batch = shape
    return f"{layers} layers, hidden {hidden}, {heads} heads, sequence {seq_length}, batch {batch}"


def names(options: Options) -> list[str]:
    """Systems that take turns, without their stream: DTensor first, to which the others are compared."""
    products = {"own": "megazero", "torch": "megazero/torch"}
    return ["dtensor", *(name for product, name in products.items() if product in options.products)]


def alone(name: str) -> str:
    return "torch-alone" if name == "dtensor" else f"{name}-alone"


def jobs(stream: str, work: Work, options: Options) -> list[Job]:
    """A system's forms are neighbours, and so are the systems themselves."""
    single = dataclasses.replace(work, ranks=1)
    jobs = [(f"{name}-{stream}", work) for name in names(options)]
    if options.shares:
        jobs += [(f"{name}-{stream}-silent", work) for name in names(options)]
        jobs += [(alone(name), single) for name in names(options)]
    return [Job(name, its, "benchmarks.stacks") for name, its in jobs]


def agree(systems: list[Processes]) -> dict[str, dict[str, float]]:
    """Build all; how far every system is from plain blocks, on the worst rank.

    Raises:
        SystemExit: a system computes something else: timing it would mean nothing.
    """
    for system in systems:
        system.tell("build")
    gaps = {}
    for system in systems:
        system.hear()
    for system in systems:
        if not system.system.endswith("-silent"):
            answers = system.ask("check")
            gaps[system.system] = {kind: max(answer[kind] for answer in answers) for kind in answers[0]}
    wrong = {name: kinds for name, kinds in gaps.items() if not max(kinds.values()) < GAP}
    if wrong:
        raise SystemExit(f"not timed, for these differ from plain blocks by more than {GAP:g}: {wrong}")
    return gaps


def measure(stream: str, work: Work, options: Options, isolated: bool) -> dict[str, Any]:
    with alive(jobs(stream, work, options)) as systems:
        gaps = agree(systems)
        take_turns(systems, 1, 3, isolated)  # warms up
        found = take_turns(systems, options.rounds, options.steps, isolated)
    for name, gap in gaps.items():
        found[name]["gaps"] = gap
    return found


def show(about: str, results: dict[str, dict[str, Any]], work: Work, options: Options, console: Console) -> None:
    tokens = work.micro_batch_size * work.seq_length
    title = f"{about}; {work.ranks} ranks, {options.rounds} turns of {options.steps} steps; medians, 95 % intervals"
    table = Table(title=title)
    columns = (
        "stream",
        "system",
        "tokens/s",
        "x DTensor",
        "CPU ms",
        "communication",
        "of half alone",
        "MB sent",
        "gap",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "system" else "right")
    for stream, found in results.items():
        base = found[f"dtensor-{stream}"]["seconds"]
        for name in names(options):
            it = found[f"{name}-{stream}"]
            seconds = it["seconds"]
            share, half = "", ""
            if options.shares:
                silent = found[f"{name}-{stream}-silent"]["seconds"]
                share = shown([100 * (1 - q) for q in quotients(silent, seconds)], 0) + " %"
                one = found[alone(name)]["seconds"]
                half = shown([work.ranks * q for q in quotients(seconds, one)], 2)
            table.add_row(
                stream,
                SYSTEMS[f"{name}-{stream}"].label,
                shown([tokens / s for s in seconds], 0),
                "" if name == "dtensor" else shown(quotients(base, seconds), 2),
                shown([1000 * s for s in it["cpu"]], 1),
                share,
                half,
                f"{sum(it['wire']) / len(it['wire']) / 1e6:.2f}" if it["wire"] else "not measured",
                f"{max(it['gaps'].values()):.0e}",
            )
        table.add_section()
    console.print(table)


def main(options: Options) -> None:
    if options.quick:
        tiny = {
            "layers": 2,
            "hidden": 64,
            "heads": 4,
            "seq_length": 16,
            "batch": 2,
            "narrow": False,
            "streams": ("sharded",),
        }
        options = dataclasses.replace(options, **tiny, rounds=2, steps=1, products=("own",))
    gpus = torch.cuda.device_count()
    if options.ranks > gpus > 0:
        raise SystemExit(f"--ranks {options.ranks}: there are {gpus} GPUs, and a rank needs its own")
    if gpus or not has_onednn():
        options = dataclasses.replace(options, products=("own",))
    console = Console(width=150 if not sys.stdout.isatty() else None)
    isolated = not gpus and isolate()
    results: dict[str, Any] = {}
    for about, work in options.works().items():
        results[about] = {stream: measure(stream, work, options, isolated) for stream in options.streams}
        show(about, results[about], work, options, console)
    if options.json:
        about_run = {"torch": torch.__version__, "cores": os.cpu_count(), "options": dataclasses.asdict(options)}
        Path(options.json).write_text(json.dumps({"about": about_run, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Options, description=__doc__))
