"""From flags to the final configuration and the layout of its ranks. Pure."""

from __future__ import annotations

import dataclasses

from megazero.config.schema import Config
from megazero.config.validate import check_values
from megazero.plan.split import layer_split
from megazero.plan.topology import Layout


def resolve(config: Config, world_size: int, vocab_size: int) -> tuple[Config, Layout]:
    """The final config, every 0 that stands for a derived value replaced, and the layout of the ranks.

    Args:
        world_size: ranks that were started.
        vocab_size: of the tokenizer; 0 when there is none.

    Raises:
        ValueError: naming the flag, its value and the way out.
    """
    check_values(config)
    layout = make_layout(config, world_size)
    vocabulary = config.model.vocab_size or vocab_size
    if not vocabulary:
        raise ValueError("--tokenizer is missing, and so is --vocab-size; name the tokenizer of the data")
    if vocabulary < vocab_size:
        raise ValueError(
            f"--vocab-size {vocabulary} is smaller than the {vocab_size} tokens of --tokenizer "
            f"{config.data.tokenizer}; use at least {vocab_size}, or leave it out"
        )
    replace = dataclasses.replace
    model = replace(config.model, vocab_size=vocabulary, ffn_hidden_size=config.model.ffn_size)
    config = replace(
        config,
        model=model,
        training=replace(
            config.training, global_batch_size=_global_batch(config, layout), grad_dtype=_grad_dtype(config)
        ),
        optimizer=replace(
            config.optimizer,
            lr_decay_iters=config.optimizer.lr_decay_iters or config.training.train_iters,
        ),
    )
    return config, replace(layout, split=layer_split(config))


def make_layout(config: Config, world_size: int) -> Layout:
    """pp and tp as asked, dp whatever is left; layers split evenly."""
    tp, pp = config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size
    if world_size % (tp * pp):
        fits = max(1, world_size // (tp * pp)) * tp * pp
        raise ValueError(
            f"--tensor-model-parallel-size {tp} x --pipeline-model-parallel-size {pp} = {tp * pp} does not "
            f"divide the {world_size} ranks that were started; start {fits} or {fits + tp * pp}, or change either"
        )
    dp, shards = world_size // (tp * pp), config.zero.zero_shard_size
    if shards and dp % shards:
        sizes = ", ".join(str(n) for n in range(2, dp + 1) if dp % n == 0)
        raise ValueError(
            f"--zero-shard-size {shards} does not divide the {dp} data-parallel ranks; "
            f"use {sizes}{', or ' * bool(sizes)}0 for all"
        )
    return Layout(pp, dp, tp, shards, config.parallel.virtual_pipeline_stages)


def _grad_dtype(config: Config) -> str:
    """fp64 gradients in an fp64 run, which `check_values` allows no narrower ones; else as asked."""
    return "fp64" if config.training.precision == "fp64" else config.training.grad_dtype


def _global_batch(config: Config, layout: Layout) -> int:
    micro = config.training.micro_batch_size
    once = micro * layout.dp
    asked = config.training.global_batch_size or once
    if asked % once:
        fits = max(once, asked // once * once)
        raise ValueError(
            f"--global-batch-size {asked} is not divisible by --micro-batch-size {micro} x {layout.dp} "
            f"data-parallel ranks = {once}; use {fits} or {fits + once}"
        )
    micro_batches, pp = asked // once, layout.pp
    if config.parallel.pipeline_schedule == "interleaved" and micro_batches % pp:
        fits = max(1, micro_batches // pp) * pp
        raise ValueError(
            f"--pipeline-schedule interleaved sends micro-batches round in groups of --pipeline-model-parallel-size "
            f"{pp}, which does not divide the {micro_batches} micro-batches of --global-batch-size {asked}; use a "
            f"--global-batch-size of {fits * once} or {(fits + pp) * once}, or --pipeline-schedule 1f1b"
        )
    return asked
