#!/usr/bin/env python3
"""Bytes per rank of ZeRO 0-3, measured on real and pretended ranks, next to the formulas and the paper's Table 1.

Real ranks are gloo processes; pretended ones are this process as rank 0 of a world whose collectives answer at once
(torch's "fake" backend): the engine is the same, and counts the same bytes. Prints Markdown. Example:

    python -m benchmarks.zero_table --real 1 2 3 4 --pretended 64 256 1024
"""

import multiprocessing
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megazero.engine.mesh.mesh import Mesh
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.step.batch import MicroBatch
from megazero.engine.step.engine import Engine
from megazero.flags.config import Config, ModelConfig, TrainingConfig, ZeroConfig
from megazero.flags.resolve import resolve
from megazero.observe.step_metrics import memory_bytes
from megazero.planner.bytes.estimate import estimate, stage_bytes

MODEL = ModelConfig(num_layers=4, hidden_size=256, num_attention_heads=4, seq_length=64, vocab_size=1024)
K = 12  # bytes of fp32 master weights and moments, mixed precision (the paper's)


@dataclass(frozen=True)
class Options:
    """Bytes per rank of ZeRO 0-3, measured, by formula, and in the paper."""

    real: tuple[int, ...] = (1, 2, 3, 4)
    """Data-parallel degrees to run with real processes."""
    pretended: tuple[int, ...] = (64, 256, 1024)
    """And with pretended ranks."""


def config_of(stage: int, dp: int) -> Config:
    """bf16 with 16-bit gradients, as in the paper; one micro-batch of one sample a rank."""
    training = TrainingConfig(precision="bf16", grad_dtype="bf16", global_batch_size=dp, train_iters=1)
    return resolve(Config(model=MODEL, training=training, zero=ZeroConfig(zero_stage=stage)), dp, 0, declare)[0]


def measure(rank: int, world: int, backend: str, store: Any, stages: range) -> list[dict[str, dict[str, int]]]:
    """Memory and traffic of rank `rank` in one iteration, a stage each."""
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    found = []
    for stage in stages:
        mesh = Mesh.build(Layout(dp=world), rank, torch.device("cpu"))
        engine = Engine(config_of(stage, world), mesh)
        ids = torch.randint(0, MODEL.vocab_size, (1, MODEL.seq_length + 1), generator=torch.Generator().manual_seed(0))
        before = mesh.sent()
        result = engine.train_step(1, [MicroBatch(ids[:, :-1], ids[:, 1:], torch.ones(1, MODEL.seq_length), (0,))])
        after = mesh.sent()
        traffic = {kind: after[kind] - before[kind] for kind in after}
        found.append({"memory": memory_bytes(engine, result), "traffic": traffic})
    if world > 1:
        dist.destroy_process_group()
    return found


def _child(rank: int, world: int, path: str, queue: Any) -> None:
    if world == 0:  # pretended ranks have a process of their own: a process has one default group
        from torch.testing._internal.distributed.fake_pg import FakeStore

        queue.put((rank, measure(0, int(path), "fake", FakeStore(), range(4))))
    else:
        queue.put((rank, measure(rank, world, "gloo", dist.FileStore(path, world), range(4))))


def run(world: int, pretended: bool) -> list[dict[str, dict[str, int]]]:
    """Rank 0's numbers; of real ranks all must agree."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "store")
        jobs = [(0, 0, str(world), queue)] if pretended else [(r, world, path, queue) for r in range(world)]
        processes = [context.Process(target=_child, args=job) for job in jobs]
        for process in processes:
            process.start()
        found = dict(queue.get(timeout=300) for _ in processes)
        for process in processes:
            process.join()
    assert all(numbers == found[0] for numbers in found.values()), "ranks differ"
    return found[0]


def rows(dp: int, pretended: bool) -> list[str]:
    measured = run(dp, pretended)
    lines = []
    for stage, numbers in enumerate(measured):
        config, layout = config_of(stage, dp), Layout(dp=dp)
        said = estimate(config, layout, needs_staging_buffer=not pretended)
        total = stage_bytes(config, layout, 0, "cpu").numel
        memory, sent = numbers["memory"], numbers["traffic"]["dp"]
        assert (memory, numbers["traffic"]) == said, (stage, dp, numbers, said)
        states = sum(memory[kind] for kind in ("parameters", "gradients", "optimizer"))
        parts = dp if dp > 1 else 1
        formula = {0: 16, 1: 4 + K / parts, 2: 2 + 14 / parts, 3: 16 / parts}[stage] * total
        ideal = {0: 2, 1: 2, 2: 2, 3: 3}[stage] * (dp - 1) / dp
        elements = sent / 2 / total
        lines.append(
            f"| {dp}{' (pretended)' * pretended} | {stage} | {states:,} | {memory['buffers']:,} | {formula:,.0f} | "
            f"{states / total:.4f} | {formula / total:.4f} | {elements:.4f} | {ideal:.4f} |"
        )
    return lines


def main(options: Options) -> None:
    total = stage_bytes(config_of(0, 1), Layout(), 0, "cpu").numel
    print(f"Psi = {total:,} elements with padding at dp 1: {MODEL}\n")
    print(
        "| dp | stage | states, bytes | buffers, bytes | paper, bytes "
        "| states / Psi | paper | sent, elements / Psi | paper |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for dp in options.real:
        print("\n".join(rows(dp, False)), flush=True)
    for dp in options.pretended:
        print("\n".join(rows(dp, True)), flush=True)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Options))
