#!/usr/bin/env python3
"""Predicted next to measured step times of real CPU runs, from a device file measured in the same minutes.

Measurements of the device and runs take turns, because the load of the machine changes. A step's result is the minimum
of its seconds, because other work makes it wait, and the median of the computing thread's CPU seconds. Example:

    python benchmarks/predict.py --rounds 5
"""

import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import device
from megazero.checkpoint.messages import wait_for_all
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.step.batch import MicroBatch
from megazero.engine.step.engine import Engine
from megazero.flags.cli import parse
from megazero.flags.config import Config
from megazero.flags.resolve import resolve
from megazero.planner.time.step_time import step_time
from tests.helpers.ranks import Program, Ranks

MODEL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --vocab-size 2048 --micro-batch-size 4"
)
RUNS = {  # name -> ranks, flags
    "1 rank": (1, "--global-batch-size 8"),
    "1 rank, recompute": (1, "--global-batch-size 8 --recompute full"),
    "2 ranks, dp, ZeRO 1": (2, "--global-batch-size 16 --zero-stage 1"),
    "2 ranks, dp, ZeRO 3": (2, "--global-batch-size 16 --zero-stage 3"),
    "2 ranks, tp": (2, "--global-batch-size 8 --tensor-model-parallel-size 2"),
    "2 ranks, pp": (2, "--global-batch-size 16 --pipeline-model-parallel-size 2"),
    "4 ranks, dp x tp": (4, "--global-batch-size 16 --tensor-model-parallel-size 2 --zero-stage 2"),
    "4 ranks, pp x dp": (4, "--global-batch-size 32 --pipeline-model-parallel-size 2"),
}


class Step(NamedTuple):
    """A measured step: the mean of all ranks' seconds; the most CPU seconds that a rank's thread computes."""

    seconds: float
    computing: float


@dataclass(frozen=True)
class Options:
    """Compare predicted with measured step times."""

    rounds: int = 5
    """Rounds of measurements and runs in turns."""
    steps: int = 4
    """Steps of a run in a round."""


def config_of(flags: str) -> Config:
    return parse([*MODEL.split(), *flags.split()])


def mock_batches(config: Config, layout: Layout, rank: int) -> list[MicroBatch]:
    """Return the micro-batches of a step, of random tokens."""
    b, s, count = config.training.micro_batch_size, config.model.seq_length, config.micro_batches(layout.dp)
    ids = torch.randint(0, config.model.vocab_size, (count, b, s + 1), generator=torch.Generator().manual_seed(rank))
    return [
        MicroBatch(ids[n, :, :-1], ids[n, :, 1:], torch.ones(b, s), tuple(range(n * b, n * b + b)))
        for n in range(count)
    ]


def run(rank: int, ranks: int, flags: str, steps: int) -> list[tuple[float, float]]:
    """Train, and return the seconds of every step but the first two, and CPU seconds of the thread that computes."""
    config, layout = resolve(config_of(flags), ranks, 0, declare)
    mesh = Mesh.build(layout, rank, torch.device("cpu"), check_buffers=False)
    engine, batches, seconds = Engine(config, mesh), mock_batches(config, layout, rank), list[tuple[float, float]]()
    for n in range(steps + 2):
        start, computing = time.perf_counter(), time.thread_time()
        engine.train_step(n + 1, batches)
        seconds.append((time.perf_counter() - start, time.thread_time() - computing))
    engine.wait()  # ZeRO 1 and 2 leave weights in flight: see Note [messages in flight]
    wait_for_all(mesh)
    return seconds[2:]


def measure(rounds: int, steps: int) -> tuple[device.Measured, dict[str, list[Step]]]:
    """Measure the device and the runs in turns."""
    from benchmarks import predict  # by its name, under which ranks find `run`

    worlds = (1, 2, 4)
    found, seconds = device.Measured(), {name: list[Step]() for name in RUNS}
    for n in range(rounds):
        # Start new ranks in each round, because process groups and their threads stay until the ranks end.
        groups = {world: Ranks(world, Program(env={"OMP_NUM_THREADS": "1"}), seconds=600) for world in worlds}
        try:
            device.measure_round(found, groups)
            for name, (ranks, flags) in RUNS.items():
                each = groups[ranks].run(predict.run, ranks, flags, steps)
                for step in zip(*each, strict=True):
                    seconds[name].append(Step(statistics.mean(wall for wall, _ in step), max(cpu for _, cpu in step)))
        finally:
            for group in groups.values():
                group.stop()
        print(f"round {n + 1} of {rounds}", file=sys.stderr)
    return found, seconds


def main() -> None:
    options = tyro.cli(Options)
    found, steps = measure(options.rounds, options.steps)
    measured = device.device_of(found, 4)
    print("| run | computing: predicted ms | CPU ms | ratio | a step: predicted ms | least ms | ratio | median ms |")
    print("|" + "---|" * 8)
    errors = []
    for name, (ranks, flags) in RUNS.items():
        config, layout = resolve(config_of(flags), ranks, 0, declare)
        expected = step_time(config, layout, measured, with_range=False).expected
        computing = sum(expected.parts[part] for part in ("compute", "recompute", "optimizer", "copies"))
        cells, ratios = [name], list[float]()
        for predicted, real in (
            (computing, statistics.median(step.computing for step in steps[name])),
            (expected.seconds, min(step.seconds for step in steps[name])),
        ):
            ratios.append(predicted / real)
            cells += [f"{1e3 * predicted:.0f}", f"{1e3 * real:.0f}", f"{ratios[-1]:.2f}"]
        errors.append([abs(ratio - 1) for ratio in ratios])
        print(f"| {' | '.join(cells)} | {1e3 * statistics.median(step.seconds for step in steps[name]):.0f} |")
    for title, each in zip(("computing", "a step"), zip(*errors, strict=True), strict=True):
        within = sum(error <= 0.2 for error in each)
        print(
            f"\n{title}: mean absolute error {statistics.mean(each):.0%}, worst {max(each):.0%}, {within} within 20 %"
        )


if __name__ == "__main__":
    main()
