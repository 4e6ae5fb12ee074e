#!/usr/bin/env python3
"""Start-up of a partitioned model: seconds until it is ready and until its first step is done, and the peak of memory.

One process is rank 0 of a pretended world (torch's "fake" backend): it allocates, draws and computes as that rank
does, and waits for no other rank. Example, GPT-2 1.5B on 8 ranks:

    python -m benchmarks.startup --preset gpt2-1.5b --ranks 8 --stage 3 --seq-length 128
"""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import tyro
from torch.testing._internal.distributed.fake_pg import FakeStore

from megazero.comm.mesh.mesh import Mesh
from megazero.config.cli import parse
from megazero.data.loader import MicroBatch
from megazero.model.stage import declare
from megazero.plan.layout.resolve import resolve
from megazero.step.engine import Engine


@dataclass(frozen=True)
class Options:
    """Seconds and memory of a partitioned model's start."""

    preset: str = "gpt2-1.5b"
    ranks: int = 8
    """Ranks of the pretended world."""
    stage: int = 3
    seq_length: int = 128
    """Shorter than the preset's, for a CPU."""


def resident() -> float:
    """Peak of resident memory so far, GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main(o: Options) -> None:
    flags = ["--preset", o.preset, "--zero-stage", str(o.stage), "--seq-length", str(o.seq_length)]
    asked = parse([*flags, "--micro-batch-size", "1", "--precision", "bf16", "--grad-dtype", "bf16"])
    asked = replace(asked, training=replace(asked.training, global_batch_size=0))
    config, layout = resolve(asked, o.ranks, 0, declare)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=o.ranks)
    mesh = Mesh.build(layout, 0, torch.device("cpu"))
    before, start = resident(), time.perf_counter()
    engine = Engine(config, mesh)
    ready, held = time.perf_counter() - start, resident()
    ids = torch.randint(0, config.model.vocab_size, (1, o.seq_length + 1))
    engine.train_step(1, [MicroBatch(ids[:, :-1], ids[:, 1:], torch.ones(1, o.seq_length), (0,))])
    done = time.perf_counter() - start
    units = engine.zero.units.values()
    largest = max(unit.flat.numel for unit in units)
    print(
        f"{o.preset} on {o.ranks} pretended ranks, stage {o.stage}: ready in {ready:.1f} s, "
        f"first step done after {done:.1f} s\n"
        f"resident: {before:.2f} GiB before, {held:.2f} at most until ready, {resident():.2f} at most after the step\n"
        f"at rest by the tracker: {engine.tracker.total / 2**30:.2f} GiB; whole model in fp32: "
        f"{4 * sum(unit.flat.numel for unit in units) / 2**30:.2f} GiB; largest unit: {4 * largest / 2**30:.2f} GiB"
    )


if __name__ == "__main__":
    main(tyro.cli(Options))
