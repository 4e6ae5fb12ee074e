#!/usr/bin/env python3
"""The layout that `--layout auto` chooses, next to the other layouts of the same ranks, measured on this machine.

A first round trains a few steps in every layout of the search, or in those that it ranks first. Then the chosen layout
and the fastest ones take turns for several rounds, because the load of the machine changes. A layout's result is the
least of its seconds. Example, ten minutes:

    python benchmarks/layouts.py --ranks 2
"""

import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.predict import mock_batches
from megazero.checkpoint.messages import wait_for_all
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.model.stage import declare
from megazero.engine.step.engine import Engine
from megazero.flags.cli import read
from megazero.flags.config import Config
from megazero.flags.flag_names import LAYOUT_FLAGS, as_flag, value_of
from megazero.flags.resolve import resolve
from megazero.host import Machine, host_memory
from megazero.planner.search.candidates import candidates
from megazero.planner.search.choose import choose_layout, device_of_ranks
from megazero.planner.time.step_time import step_time
from tests.helpers.ranks import Program, Ranks

MODEL = "--preset tiny --vocab-size 257 --mock-data --layout auto"
AT_ONCE = 8  # layouts that the same processes train, because groups and their threads stay until the ranks end


@dataclass(frozen=True)
class Options:
    """Compare the layout that --layout auto chooses with the others."""

    ranks: int = 2
    """Ranks of this machine."""
    batch: int = 8
    """--global-batch-size."""
    flags: str = ""
    """More flags of the model, or of the layouts."""
    layouts: int = 0
    """Layouts of the first round: those predicted to be the fastest. 0: all."""
    best: int = 6
    """The fastest layouts of the first round, which are measured again."""
    rounds: int = 8
    """Rounds of the second part."""
    steps: int = 3
    """Steps of a layout in a round, after one that does not count."""


def run(rank: int, ranks: int, layouts: list[str], steps: int) -> list[list[float]]:
    """Train in each layout, a command line, and return the seconds of each step but the first."""
    found = []
    for line in layouts:
        config, layout = resolve(read(line.split()).config, ranks, 0, declare)
        mesh = Mesh.build(layout, rank, torch.device("cpu"), check_buffers=False)
        engine, seconds = Engine(config, mesh), list[float]()
        batches = mock_batches(config, layout, rank)
        for step in range(steps + 1):
            wait_for_all(mesh)
            start = time.perf_counter()
            engine.train_step(step + 1, batches)
            wait_for_all(mesh)
            seconds.append(time.perf_counter() - start)
        engine.wait()
        found.append(seconds[1:])
    return found


def measure(options: Options, line: str, names: list[str], number: int) -> dict[str, float]:
    """Return the least seconds of a step in each layout, whose flags follow `line`. number: of the round."""
    from benchmarks import layouts as module  # by its name, under which ranks find `run`

    found, order = dict[str, float](), random.Random(number).sample(names, len(names))
    for at in range(0, len(order), AT_ONCE):
        some = order[at : at + AT_ONCE]
        group = Ranks(options.ranks, Program(env={"OMP_NUM_THREADS": "1"}), seconds=600)
        try:
            each = group.run(module.run, options.ranks, [f"{line} {name}" for name in some], options.steps)
        finally:
            group.stop()
        for name, ranks in zip(some, zip(*each, strict=True), strict=True):
            found[name] = min(max(times) for times in zip(*ranks, strict=True))
        print(f"round {number}: {len(found)} of {len(names)} layouts", file=sys.stderr)
    return found


def flags_of(config: Config) -> str:
    """Return the flags of a layout that differ from their defaults."""
    given = [(name, value_of(config, name)) for name in LAYOUT_FLAGS]
    return " ".join(as_flag(name, value) for name, value in given if value != value_of(Config(), name))


def main() -> None:
    options = tyro.cli(Options)
    asked = f"{MODEL} --global-batch-size {options.batch} {options.flags}"
    command = read(asked.split())
    memory = host_memory()
    machine = Machine(range(options.ranks), "cpu", None, memory, memory.num_bytes if memory else None)
    device = device_of_ranks(command.config, "", machine, options.ranks)
    choice = choose_layout(command.config, command.given, options.ranks, 0, device)
    chosen, predicted = flags_of(choice.apply(command.config)), dict[str, float]()
    fixed = {name: value_of(command.config, name) for name in LAYOUT_FLAGS if name in command.given}
    for candidate in candidates(command.config, options.ranks, device, fixed):
        try:
            config, layout = resolve(candidate.apply(command.config, fixed), options.ranks, 0, declare)
        except ValueError:
            continue
        predicted[flags_of(config)] = step_time(config, layout, device, with_range=False).expected.seconds
    line = asked.replace("--layout auto", "")
    names = sorted(predicted, key=lambda name: predicted[name])[: options.layouts or None]
    first = measure(options, line, names, 0)
    kept = list(dict.fromkeys([chosen, *sorted(names, key=lambda name: first[name])[: options.best]]))
    rounds = [measure(options, line, kept, number) for number in range(options.rounds)]
    least = {name: min(found[name] for found in rounds) for name in kept}
    middle = {name: statistics.median(found[name] for found in rounds) for name in kept}
    slower = [seconds / first[chosen] for seconds in first.values()]
    print(f"{options.ranks} ranks, {len(names)} layouts; --layout auto chose: {chosen or 'the defaults'}")
    print("| layout | predicted ms | least ms | median ms |\n|---|---|---|---|")
    for name in sorted(kept, key=lambda name: least[name]):
        shown = f"{'**auto** ' if name == chosen else ''}`{name or 'the defaults'}`"
        print(f"| {shown} | {1e3 * predicted[name]:.0f} | {1e3 * least[name]:.0f} | {1e3 * middle[name]:.0f} |")
    print(
        f"\nchosen / fastest: {least[chosen] / min(least.values()):.3f} (least), "
        f"{middle[chosen] / min(middle.values()):.3f} (median). In the first round, the median of all layouts took "
        f"{statistics.median(slower):.2f} times as long as the chosen one, the slowest {max(slower):.2f} times"
    )


if __name__ == "__main__":
    main()
