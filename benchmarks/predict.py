#!/usr/bin/env python3
"""Predicted beside measured: step times of real CPU runs, from a device file measured in the same minutes.

Measurements of the device and runs take turns, since what else runs on the machine changes. Example:

    python benchmarks/predict.py --rounds 5
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import device
from benchmarks.launcher import Program, Ranks
from megazero.comm.mesh import Mesh
from megazero.config.cli import parse
from megazero.config.schema import Config
from megazero.data.loader import MicroBatch
from megazero.plan.resolve import resolve
from megazero.price.step_time import step_time
from megazero.train.engine import Engine

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


@dataclass(frozen=True)
class Options:
    """Compare predicted with measured step times."""

    rounds: int = 5
    """Rounds of measurements and runs in turns."""
    steps: int = 4
    """Steps of a run in a round."""


def config_of(flags: str) -> Config:
    return parse([*MODEL.split(), *flags.split()])


def run(rank: int, ranks: int, flags: str, steps: int) -> list[float]:
    """Train, and return the seconds of every step but the first two."""
    config, layout = resolve(config_of(flags), ranks, 0)
    mesh = Mesh.build(layout, rank, torch.device("cpu"), check_buffers=False)
    engine, training = Engine(config, mesh), config.training
    b, s = training.micro_batch_size, config.model.seq_length
    count = config.micro_batches(layout.dp)
    ids = torch.randint(0, config.model.vocab_size, (count, b, s + 1), generator=torch.Generator().manual_seed(rank))
    batches = [
        MicroBatch(ids[n, :, :-1], ids[n, :, 1:], torch.ones(b, s), tuple(range(n * b, n * b + b)))
        for n in range(count)
    ]
    seconds = []
    for n in range(steps + 2):
        start = time.perf_counter()
        engine.train_step(n + 1, batches)
        seconds.append(time.perf_counter() - start)
    mesh.barrier()
    return seconds[2:]


def measure(rounds: int, steps: int) -> tuple[device.Measured, dict[str, list[float]]]:
    """Measure the device and the runs in turns; the seconds of a step are the mean over ranks."""
    from benchmarks import predict  # by its name, under which ranks find `run`

    worlds = (1, 2, 4)
    groups = {
        world: Ranks(world, Program(env={"OMP_NUM_THREADS": "1"}), seconds=600, separate=True) for world in worlds
    }
    found, seconds = device.Measured(), {name: list[float]() for name in RUNS}
    try:
        for n in range(rounds):
            device.measure_round(found, groups)
            for name, (ranks, flags) in RUNS.items():
                each = groups[ranks].run(predict.run, ranks, flags, steps)
                seconds[name] += [statistics.mean(step) for step in zip(*each, strict=True)]
            print(f"round {n + 1} of {rounds}", file=sys.stderr)
    finally:
        for group in groups.values():
            group.stop()
    return found, seconds


def main() -> None:
    options = tyro.cli(Options)
    found, seconds = measure(options.rounds, options.steps)
    measured, _ = device.device_of(found, 4)
    print("| run | predicted ms (range) | measured ms (quartiles) | predicted / measured |\n|---|---|---|---|")
    errors = []
    for name, (ranks, flags) in RUNS.items():
        config, layout = resolve(config_of(flags), ranks, 0)
        expected = step_time(config, layout, measured)
        low, middle, high = statistics.quantiles(seconds[name], n=4)
        ratio = expected.expected.seconds / middle
        errors.append(abs(ratio - 1))
        predicted = [f"{1e3 * value:.0f}" for value in (expected.expected.seconds, expected.fast, expected.slow)]
        print(
            f"| {name} | {predicted[0]} [{predicted[1]}, {predicted[2]}] | "
            f"{1e3 * middle:.0f} [{1e3 * low:.0f}, {1e3 * high:.0f}] | {ratio:.2f} |"
        )
    print(f"\nmean absolute error {statistics.mean(errors):.0%}, worst {max(errors):.0%}")


if __name__ == "__main__":
    main()
