"""Defaults that differ on GPUs: what nearly every run there wants, for flags that were not given.

On a CPU, and for every flag that the command line or its preset gives, the defaults of `schema` hold.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from megazero.config.model_options import Precision
from megazero.config.schema import Config

WARMUP_SHARE, MOST_WARMUP = 100, 2000  # one iteration of so many warms up, and at most so many do


def gpu_defaults(config: Config, given: Collection[str], precision: Precision) -> tuple[Config, str]:
    """Choose a precision and a warm-up of 1 % of the iterations, at most 2,000, where they are not given.

    Args:
        config: not resolved yet.
        given: names of the flags, without dashes, that the command line or its preset set.
        precision: the one that the GPU multiplies fastest in: bf16; fp16 on a GPU that imitates bf16, such as a V100;
            fp32 on one without tensor cores.

    Returns:
        The configuration, and what was chosen, for the start of the run; empty where nothing was.
    """
    said, instead = [], []
    if precision != "fp32" and "precision" not in given and config.training.grad_dtype in ("fp32", precision):
        config = replace(config, training=replace(config.training, precision=precision))
        reason = " with loss scaling (this GPU has no bf16)" if precision == "fp16" else ""
        said.append(f"--precision {precision}{reason}")
        instead.append("--precision fp32")
    decay = config.optimizer.lr_decay_iters or config.training.train_iters
    warmup = min(MOST_WARMUP, decay // WARMUP_SHARE)
    if warmup and config.trains and "lr-warmup-iters" not in given:
        config = replace(config, optimizer=replace(config.optimizer, lr_warmup_iters=warmup))
        said.append(f"--lr-warmup-iters {warmup}")
        instead.append("--lr-warmup-iters 0")
    if not said:
        return config, ""
    return config, f"{' and '.join(said)}, the default on GPUs ({' '.join(instead)}: without)"
