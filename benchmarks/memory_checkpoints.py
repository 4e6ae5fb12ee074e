#!/usr/bin/env python3
"""Cost of --memory-checkpoint-interval: steps with a copy in the background next to steps without, in turns.

    python -m benchmarks.memory_checkpoints --ranks 2 --steps 20 --rounds 8

Each rank is a node of its own, so every file is copied to another rank. A round has `steps` steps that begin with a
copy and end when it is done, and as many without; the difference is the cost of a copy. It is also given in seconds of
computing time, which other processes of the machine change less. On a CPU, a copy takes them from the steps; on a GPU,
the host's cores have them to spare.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro

from benchmarks.measure import interval
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.model.stage import declare
from megazero.engine.options.schema import CheckpointConfig
from megazero.flags.cli import parse
from megazero.flags.resolve import resolve
from megazero.log import log_as
from megazero.run.inputs import open_data
from tests.helpers.ranks import Forked, Ranks
from tests.helpers.runs import new_run

GOAL = 0.01  # of the time of a step
FLAGS = (
    "--mock-data --num-layers 6 --hidden-size 512 --num-attention-heads 8 --seq-length 128 --vocab-size 8192 "
    "--micro-batch-size 2"
)


@dataclass(frozen=True)
class Options:
    """Cost of a copy of the checkpoint into the memory of the nodes."""

    ranks: int = 2
    steps: int = 20
    """Steps between two copies; a copy must be done in fewer."""
    rounds: int = 8
    flags: str = FLAGS
    """Flags of the run; --global-batch-size is added."""


def measure(rank: int, o: Options, folder: str) -> dict[str, Any]:
    """Run all rounds on a rank; return seconds of both kinds of blocks, of their computing, of stops for copies."""
    os.environ["MEGAZERO_NODE"] = f"node{rank}"
    torch.set_num_threads(1)
    log_as(rank, o.ranks)
    config = parse([*o.flags.split(), "--global-batch-size", str(2 * o.ranks)])
    kept = CheckpointConfig(
        save=f"{folder}/saved", memory_checkpoint_interval=o.steps, memory_checkpoint_dir=f"{folder}/memory"
    )
    config, layout = resolve(replace(config, checkpoint=kept), o.ranks, 0, declare)
    mesh = Mesh.build(layout, rank, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    run = new_run(config, mesh, open_data(config, None))
    saves, trainer = run.checkpoints, run.trainer
    blocks: dict[bool, list[float]] = {False: [], True: []}
    cpu: dict[bool, list[float]] = {False: [], True: []}
    stops: list[float] = []
    for number in range(o.rounds + 1):
        for copies in (True, False) if number % 2 else (False, True):
            mesh.barrier()
            start, computed = time.perf_counter(), time.process_time()
            if copies:
                saves.save_in_memory(trainer.progress)
                stops.append(time.perf_counter() - start)
            for _ in range(o.steps):
                trainer.iterate()
            trainer.engine.wait()
            if copies:
                assert saves.memory_saver.idle, "a copy takes longer than --steps steps"
            cpu[copies].append(time.process_time() - computed)
            mesh.barrier()
            blocks[copies].append(time.perf_counter() - start)
    files = sum(path.stat().st_size for path in Path(folder, "memory").rglob("rank_*"))
    saves.end_in_memory(trainer.progress)
    trainer.train_batches.close()
    # The first round allocates buffers.
    found: dict[str, Any] = {"with": blocks[True][1:], "without": blocks[False][1:], "stops": stops[1:], "bytes": files}
    return found | {"CPU with": cpu[True][1:], "CPU without": cpu[False][1:]}


def main(o: Options) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        Path(folder, "saved").mkdir()
        ranks = Ranks(
            o.ranks, Forked(["torch", "megazero.run.trainer"]), seconds=1800.0, gpus=torch.cuda.is_available()
        )
        found = ranks.run(measure, o, folder)[0]
        ranks.stop()
    step = statistics.median(found["without"]) / o.steps
    costs = [(ours - plain) / step for ours, plain in zip(found["with"], found["without"], strict=True)]
    cost, (low, high), stop = statistics.median(costs), interval(costs), statistics.median(found["stops"])
    size = found["bytes"] / (4e6 if o.ranks > 1 else 2e6)  # two checkpoints, each in as many copies
    print(f"{o.ranks} ranks, {size:.0f} MB a checkpoint, {step:.3f} s a step; load {os.getloadavg()[0]:.1f}")
    print(f"a copy costs {cost:.2f} [{low:.2f}, {high:.2f}] steps; training stops for {stop:.3f} s")
    extra = [ours - plain for ours, plain in zip(found["CPU with"], found["CPU without"], strict=True)]
    low_cpu, high_cpu = interval(extra)
    each = statistics.median(found["CPU without"]) / o.steps
    more = f"{statistics.median(extra):.2f} [{low_cpu:.2f}, {high_cpu:.2f}] s"
    print(f"a copy computes for {more} on a rank, and a step for {each:.3f} s")
    print("| interval | cost per step |\n|---|---|")
    for steps in (10, 20, 50, 100, 200):
        print(f"| {steps} | {cost / steps:.2%} [{low / steps:.2%}, {high / steps:.2%}] |")
    print(
        f"under {GOAL:.0%} from an interval of {max(1, int(cost / GOAL) + 1)} steps on, or {cost * step / GOAL:.0f} s"
    )


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
