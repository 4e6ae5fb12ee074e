"""megazero's training step at some stages, with and without recompute, for `before_after.py`.

Runs in this tree and in trees of old revisions, into which it is copied: it knows where each has what it needs. The
modules of `benchmarks` that it imports are the tree's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import megazero
from benchmarks.peers import Training, Work

try:
    from megazero.comm.mesh.mesh import Mesh
    from megazero.model.stage import declare
    from megazero.plan.layout.resolve import resolve
    from megazero.step.engine import Engine
except ModuleNotFoundError:  # before the folders `step` and `run`
    from megazero.plan.resolve import resolve
    from megazero.train.engine import Engine

    from megazero.comm.mesh import Mesh

    declare = None
from megazero.data.loader import MicroBatch
from megazero.memory.allocated import Allocated

MICRO_BATCHES = 2  # per step; the work's batch is that of the step
assert Path(megazero.__file__).parents[1] == Path(__file__).parents[1], "another tree's megazero was imported"


class System(NamedTuple):
    """A configuration; `make(work, device)` gives a rank's training."""

    make: Callable[[Work, torch.device], Training]


def own(work: Work, device: torch.device, stage: int, recompute: str) -> Training:
    """Build the engine of this tree; `check` gives the bytes of a step."""
    config = work.config(stage)
    part = work.micro_batch_size // MICRO_BATCHES
    config = replace(
        config,
        training=replace(config.training, micro_batch_size=part, global_batch_size=work.micro_batch_size * work.ranks),
        activations=replace(config.activations, recompute=recompute),
    )
    config, layout = resolve(config, work.ranks, 0, *filter(None, (declare,)))
    engine: Any = Engine(config, Mesh.build(layout, dist.get_rank(), device))
    tracker = engine.tracker if hasattr(engine, "tracker") else engine.ledger  # its name in old revisions
    mask = torch.ones(part, work.seq_length, device=device)

    def step(ids: torch.Tensor, labels: torch.Tensor) -> float:
        parts = zip(ids.split(part), labels.split(part), strict=True)
        batches = [MicroBatch(i, t, mask, tuple(range(n * part, (n + 1) * part))) for n, (i, t) in enumerate(parts)]
        return engine.train_step(1, batches).loss

    def check() -> dict[str, float]:
        with Allocated(device) as alive:
            step(*work.inputs(0, dist.get_rank(), device))
        return {"alive": alive.peak, "tracked": tracker.total_peak}

    return Training(step, engine.wait if hasattr(engine, "wait") else engine.zero.wait, check)


def _system(stage: int, recompute: str) -> System:
    return System(lambda work, device: own(work, device, stage, recompute))


SYSTEMS = {f"{stage} {recompute}": _system(stage, recompute) for stage in range(4) for recompute in ("none", "full")}
