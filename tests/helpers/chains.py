"""Runs that stop and resume in other layouts, shared by the tests of resuming and `python -m tests.chains`."""

import contextlib
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megazero.data.remembered import data_tokenizer
from megazero.data.writer import IndexedWriter
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.model.stage import declare
from megazero.flags.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainingConfig,
    ZeroConfig,
)
from megazero.flags.resolve import resolve
from megazero.run.inputs import open_data
from tests.helpers.runs import new_run

MODEL = ModelConfig(
    num_layers=5, hidden_size=16, num_attention_heads=4, seq_length=8, vocab_size=257, init_method_std=0.05
)
TOLERANCE = {"fp32": 1e-6, "fp64": 1e-10}  # of a loss of 5.5 nats: fp32 rounds it to 5e-7

Curve = list[tuple[int, float]]  # iteration, loss
Layout = tuple[int, dict[str, Any], dict[str, Any]]  # ranks, ParallelConfig, ZeroConfig

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
LAYOUTS: dict[str, Layout] = {
    "alone": (1, {}, {}),
    "dp2 zero0": (2, {}, {"zero_stage": 0}),
    "dp2 zero1": (2, {}, {"zero_stage": 1}),
    "dp2 zero3": (2, {}, {"zero_stage": 3}),
    "tp2 sp": (2, {TP: 2, "sequence_parallel": True}, {}),
    "pp2": (2, {PP: 2}, {}),
    "pp2 interleaved": (2, {PP: 2, "pipeline_schedule": "interleaved", "virtual_pipeline_stages": 2}, {}),
    "dp4 zero2": (4, {}, {"zero_stage": 2}),
    "dp4 zero3 in twos": (4, {}, {"zero_stage": 3, "zero_shard_size": 2}),
    "tp2 dp2 zero3": (4, {TP: 2}, {"zero_stage": 3}),
    "pp2 dp2 zero-bubble": (4, {PP: 2, "pipeline_schedule": "zero-bubble"}, {"zero_stage": 2}),
    "pp2 tp2": (4, {PP: 2, TP: 2}, {}),
    "pp4 by hand": (4, {PP: 4, "pipeline_split": "2,1,1,1"}, {}),
    "cp3 zero2": (3, {CP: 3}, {"zero_stage": 2}),
    "cp2 tp2 ring": (4, {CP: 2, TP: 2, "sequence_parallel": True, "cp_exchange": "ring"}, {"zero_stage": 3}),
    "dp3 zero3": (3, {}, {"zero_stage": 3}),  # which cannot share 4 micro-batches equally
}


def make_corpus(folder: Path) -> str:
    """Write a small corpus; returns its prefix."""
    prefix, draw = folder / "small", np.random.default_rng(0)
    with IndexedWriter(prefix, np.uint16, {"tokenizer": "byte", "vocab_size": 257}) as writer:
        for _ in range(20):
            writer.add(draw.integers(0, 256, 100))
    return str(prefix)


def configured(name: str, corpus: str, iterations: int, precision: str, **options: Any) -> Config:
    """Make the configuration of a run up to `iterations` in a layout; `options` are of CheckpointConfig."""
    _, parallel, zero = LAYOUTS[name]
    return replace(
        Config(),
        model=MODEL,
        training=TrainingConfig(micro_batch_size=2, global_batch_size=8, train_iters=iterations, precision=precision),
        optimizer=OptimizerConfig(lr=1e-3),
        parallel=replace(ParallelConfig(), **parallel),
        zero=replace(ZeroConfig(poison_buffers=True), **zero),
        data=DataConfig(data_path=(corpus,), tokenizer="byte", num_workers=0),
        checkpoint=CheckpointConfig(**options),
    )


def train(
    rank: int, world: int, config: Config, save_every: int = 0, see: Callable[[int, float], None] | None = None
) -> Curve:
    """Train from --load to --train-iters, and save; the curve, in full precision.

    Args:
        save_every: iterations between saves before the last; 0: none.
        see: called with the iteration and its loss.
    """
    config, layout = resolve(config, world, 257, declare)
    mesh = Mesh.build(layout, rank, torch.device("cpu"), config.parallel.distributed_timeout_minutes)
    run = new_run(config, mesh, open_data(config, data_tokenizer(config)))
    run.checkpoints.waits = ()
    found = []
    with contextlib.redirect_stdout(open(os.devnull, "w")):
        _, run.trainer.progress = run.loader.resume()
        while run.trainer.progress.iteration < config.training.train_iters:
            record = run.trainer.iterate()
            found.append((record["iteration"], record["loss"]))
            if see is not None:
                see(*found[-1])
            if save_every and run.trainer.progress.iteration % save_every == 0:
                run.checkpoints.save(run.trainer.progress)
            if run.trainer.due(config.checkpoint.memory_checkpoint_interval):
                run.checkpoints.save_in_memory(run.trainer.progress)
        run.checkpoints.save(run.trainer.progress, last=True)
        run.checkpoints.end_in_memory(run.trainer.progress)
    run.trainer.train_batches.close()
    run.trainer.engine.wait()
    return found


def deviation(found: Curve, wanted: Curve) -> float:
    """The largest difference of losses of the same iterations; infinite where one is missing or not finite."""
    curve = dict(wanted)
    differences = [abs(loss - curve.get(iteration, math.nan)) for iteration, loss in found]
    return max((d if math.isfinite(d) else math.inf for d in differences), default=math.inf)
