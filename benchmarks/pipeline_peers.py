#!/usr/bin/env python3
"""A pipeline's training step against torch.distributed.pipelining: the same model, weights, data, split and AdamW.

Both sides multiply by torch's own products. Systems of a schedule take turns in one run; the ratio is our tokens/s over
theirs, of neighbouring turns. CPU ms: user and system time of a rank's whole process per step, of the rank with the
most; its ratio is ours over theirs. With one rank and gpipe it compares plain training steps. Example:

    python benchmarks/pipeline_peers.py --ranks 2 --micro-batches 8 --rounds 12
"""

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn as nn
import torch.nn.functional as F

from benchmarks import peers
from benchmarks.peer_models import PlainBlock, draw_weights
from benchmarks.peers import Training
from benchmarks.processes import Job, alive, isolate, quotients, shown, take_turns
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.plan.schedule.schedules import SCHEDULES
from megazero.flags.config import Config, ModelConfig
from megazero.flags.resolve import resolve

LOSS_GAP = 1e-5  # relative: fp32, other kernels for the loss
# our schedule -> theirs, and the virtual stages per rank there
THEIRS = {
    "gpipe": ("ScheduleGPipe", 1),
    "1f1b": ("Schedule1F1B", 1),
    "interleaved": ("ScheduleInterleaved1F1B", 2),
    "zero-bubble": ("ScheduleInterleavedZeroBubble", 1),
    "zero-bubble-v": ("ScheduleZBVZeroBubble", 2),
}


@dataclass(frozen=True)
class Work(peers.Work):
    """A pipeline of all ranks; `micro_batch_size` samples per micro-batch. Tables are not tied."""

    schedule: str = "1f1b"
    micro_batches: int = 8

    def resolved(self) -> tuple[Config, Layout]:
        config = self.config(0)
        config = replace(
            config,
            model=replace(config.model, untie_embeddings=True),
            training=replace(config.training, global_batch_size=self.micro_batch_size * self.micro_batches),
            parallel=replace(
                config.parallel,
                pipeline_model_parallel_size=self.ranks,
                pipeline_schedule=self.schedule,
                virtual_pipeline_stages=2 if SCHEDULES[self.schedule].virtual_stages else 1,
            ),
        )
        return resolve(config, self.ranks, 0, declare)

    def inputs(self, step: int, rank: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Arguments of a step, the same on every rank: ids and labels of all micro-batches."""
        whole = replace(self, micro_batch_size=self.micro_batch_size * self.micro_batches)
        tokens = whole.tokens(step * self.ranks, 0).to(device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Part(nn.Module):
    """The layers of one virtual stage. Parameters bear megazero's global names, and hold the same initial values."""

    def __init__(self, model: ModelConfig, seed: int, layers: range, first: bool, last: bool) -> None:
        super().__init__()
        h = model.hidden_size
        if first:
            self.token_embedding = nn.Embedding(model.vocab_size, h)
            self.position_embedding = nn.Embedding(model.seq_length, h)
        self.blocks = nn.ModuleDict({str(n): PlainBlock(model) for n in layers})
        if last:
            self.head = nn.ModuleDict({"norm": nn.LayerNorm(h), "output": nn.Linear(h, model.vocab_size, bias=False)})
        self.first, self.last = first, last
        draw_weights(self, model, seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            x = self.token_embedding(x) + self.position_embedding.weight[: x.shape[1]]
        for block in self.blocks.values():
            x = block(x)
        return self.head["output"](self.head["norm"](x)) if self.last else x


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def torch_pipelining(work: Work, device: torch.device) -> Training:
    """torch's schedule; fused AdamW; gradients clipped by their norm over all stages."""
    import torch.distributed as dist
    from torch.distributed import pipelining

    config, layout = work.resolved()
    rank, model = dist.get_rank(), config.model
    name, chunks = THEIRS[work.schedule]
    stages = layout.stages(rank)
    end = layout.pp * chunks - 1
    parts = [
        Part(model, config.training.seed, layout.chunk_layers(model.num_layers, rank, c), at == 0, at == end).to(device)
        for c, at in enumerate(stages)
    ]
    made = [pipelining.PipelineStage(p, at, end + 1, device) for p, at in zip(parts, stages, strict=True)]
    kind: Any = getattr(pipelining, name)
    single = name in ("ScheduleGPipe", "Schedule1F1B")
    schedule = kind(made[0] if single else made, work.micro_batches, loss_fn=_loss)
    all_parts = nn.ModuleList(parts)
    parameters = list(all_parts.parameters())
    optimizer = torch.optim.AdamW(peers._groups(all_parts, config.optimizer), **peers._adamw(config.optimizer))

    def step(ids: torch.Tensor, labels: torch.Tensor) -> float:
        losses: list[torch.Tensor] = []
        schedule.step(
            *([ids] if 0 in stages else []),
            target=labels if end in stages else None,
            losses=losses if end in stages else None,
            return_outputs=False,
        )
        numbers = torch.zeros(2, dtype=torch.float64, device=device)
        numbers[0] = torch.nn.utils.get_total_norm([p.grad for p in parameters], foreach=True).double() ** 2
        if losses:
            numbers[1] = torch.stack(losses).mean()
        dist.all_reduce(numbers)
        torch.nn.utils.clip_grads_with_norm_(parameters, config.optimizer.clip_grad, numbers[0].sqrt().float(), True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(numbers[1])

    return Training(step)


def megazero(work: Work, device: torch.device) -> Training:
    """Its own engine, under the same schedule."""
    import torch.distributed as dist

    from megazero.engine.mesh.mesh import Mesh
    from megazero.engine.step.batch import MicroBatch
    from megazero.engine.step.engine import Engine

    config, layout = work.resolved()
    engine = Engine(config, Mesh.build(layout, dist.get_rank(), device))
    b = work.micro_batch_size
    mask = torch.ones(b, work.seq_length, device=device)

    def step(ids: torch.Tensor, labels: torch.Tensor) -> float:
        parts = enumerate(zip(ids.split(b), labels.split(b), strict=True))
        return engine.train_step(
            1, [MicroBatch(i, t, mask, tuple(range(n * b, (n + 1) * b))) for n, (i, t) in parts]
        ).loss

    return Training(step, engine.wait)


class System(NamedTuple):
    label: str
    make: Callable[[Work, torch.device], Training]


SYSTEMS = {
    "torch": System("torch.distributed.pipelining", torch_pipelining),
    "megazero": System("megazero", megazero),
}


@dataclass(frozen=True)
class Options:
    """A pipeline's training step against torch.distributed.pipelining."""

    layers: int = 8
    hidden: int = 256
    heads: int = 4
    seq_length: int = 128
    vocabulary: int = 2048
    batch: int = 1
    """Samples of a micro-batch."""
    micro_batches: int = 8
    """Per step."""
    ranks: int = 2
    """Pipeline ranks, of one thread each."""
    schedules: tuple[str, ...] = tuple(THEIRS)
    rounds: int = 12
    """Turns of each system."""
    steps: int = 2
    """Steps of a turn."""
    loss_steps: int = 4
    """First steps, whose losses are compared; they warm up too."""
    json: str = ""
    """FILE for all that was measured."""


def main(options: Options) -> None:
    from rich.console import Console
    from rich.table import Table

    isolate()
    title = f"{options.ranks} ranks, {options.micro_batches} micro-batches, {options.rounds} turns of {options.steps}"
    table = Table(title=f"{title} steps; medians, 95 % intervals")
    for column in ("schedule", "theirs", "tokens/s", "theirs", "ratio", "CPU ms", "theirs", "ratio", "loss gap"):
        table.add_column(column, justify="right")
    tokens = options.batch * options.micro_batches * options.seq_length
    results = {}
    for schedule in options.schedules:
        shape = (options.layers, options.hidden, options.heads, options.seq_length, options.vocabulary, options.batch)
        work = Work(*shape, options.ranks, "fp32", schedule=schedule, micro_batches=options.micro_batches)
        with alive([Job(name, work, "benchmarks.pipeline_peers") for name in SYSTEMS]) as systems:
            losses = {}
            for system in systems:
                system.ask("build")
                losses[system.system] = system.ask("losses", options.loss_steps)[0]["losses"]
            found = take_turns(systems, options.rounds, options.steps, isolated=False)
        # `losses` divides the sum over ranks by their number: every rank of a system has the same loss
        gap = max(abs(a / b - 1) for a, b in zip(losses["megazero"], losses["torch"], strict=True))
        assert gap < LOSS_GAP, f"{schedule}: the systems do not train the same model: {losses}"
        ours, theirs = found["megazero"], found["torch"]
        table.add_row(
            schedule,
            THEIRS[schedule][0],
            *(f"{tokens / statistics.median(side['seconds']):.0f}" for side in (ours, theirs)),
            shown(quotients(theirs["seconds"], ours["seconds"]), 2),
            *(f"{1000 * statistics.median(side['cpu']):.0f}" for side in (ours, theirs)),
            shown(quotients(ours["cpu"], theirs["cpu"]), 2),
            f"{gap:.0e}",
        )
        results[schedule] = found
    Console(width=120).print(table)
    if options.json:
        Path(options.json).write_text(json.dumps({"options": asdict(options), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Options, description=__doc__))
