"""Small runs of the trainer, on the ranks of a test or in its own process."""

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megazero import checkpoint
from megazero.checkpoint.shards import LocalShard
from megazero.data.tokenizer import load_tokenizer
from megazero.data.writer import IndexedWriter
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.model.stage import declare
from megazero.flags.config import CheckpointConfig, Config, DataConfig, ModelConfig, ParallelConfig, TrainingConfig
from megazero.flags.resolve import resolve
from megazero.log import log_as
from megazero.run.inputs import open_data
from megazero.run.stopping import DeadRun, Wish
from megazero.run.training_run import TrainingRun
from tests.helpers.runs import new_run

MODEL = ModelConfig(num_layers=2, hidden_size=8, num_attention_heads=2, seq_length=8, vocab_size=257)


def write_corpus(prefix: Path) -> str:
    """Write 20 documents of 100 bytes each; returns the prefix."""
    draw = np.random.default_rng(0)
    with IndexedWriter(prefix, np.uint16, {"tokenizer": "byte", "vocab_size": 257}) as writer:
        for _ in range(20):
            writer.add(draw.integers(0, 256, 100))
    return str(prefix)


def configured(corpus: str, save: Path | str, iterations: int, eod: bool = False, **options: Any) -> Config:
    known = {field: options.pop(field) for field in ("max_skipped_iterations",) if field in options}
    return replace(
        Config(),
        model=MODEL,
        training=TrainingConfig(global_batch_size=4, train_iters=iterations, **known),
        parallel=ParallelConfig(tensor_model_parallel_size=options.pop("tp", 1)),
        data=DataConfig(data_path=(corpus,), tokenizer="byte", eod_mask_loss=eod),
        checkpoint=CheckpointConfig(save=str(save), **options),
    )


def run_of(rank: int, world: int, config: Config) -> TrainingRun:
    log_as(rank, world)
    config, layout = resolve(config, world, 257, declare)
    mesh = Mesh.build(layout, rank, torch.device("cpu"))
    return new_run(config, mesh, open_data(config, load_tokenizer("byte")), 256 if config.data.eod_mask_loss else None)


def quietly(run: TrainingRun) -> Wish | None:
    with contextlib.redirect_stdout(open(os.devnull, "w")):
        return run.train()


def train(rank: int, world: int, config: Config) -> tuple[int, str]:
    """A run as pretrain_gpt.py makes it: the iteration that it reached, and why it ended early."""
    run = run_of(rank, world, config)
    try:
        quietly(run)
    except (DeadRun, ValueError, RuntimeError) as error:
        return run.trainer.progress.iteration, f"{type(error).__name__}: {error}"
    return run.trainer.progress.iteration, ""


def weights(path: Path) -> torch.Tensor:
    shape = (257, 8)
    target = LocalShard(shape, (0, 0), shape, 0, 257 * 8, torch.zeros(257 * 8))
    checkpoint.load(path, {"model.token_embedding.weight": target}, partial=True)
    return target.data


def names(root: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in root.glob("iter_*"))
