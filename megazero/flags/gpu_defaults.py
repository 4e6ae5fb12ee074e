"""Defaults that differ on GPUs, for flags that neither the command line nor its preset gives."""

from collections.abc import Collection
from dataclasses import replace

from megazero.engine.options.schema import Precision
from megazero.flags.config import Config

WARMUP_SHARE, MOST_WARMUP = 100, 2000  # a hundredth of the iterations, and at most 2000, warm up


def gpu_defaults(config: Config, given: Collection[str], precision: Precision | None) -> tuple[Config, str]:
    """Choose a precision and a warm-up of 1 % of the iterations, at most 2,000, where they are not given.

    Args:
        config: not resolved yet.
        given: names of the flags, without dashes, that the command line or its preset set.
        precision: the one that the GPU multiplies fastest in: bf16; fp16 on a GPU that imitates bf16, such as a V100;
            fp32 on one without tensor cores; None: the device is no GPU.

    Returns:
        The configuration, and a line that reports the choices; empty if there are none.
    """
    if precision is None:
        return config, ""
    chosen, instead = [], []
    if precision != "fp32" and "precision" not in given and config.training.grad_dtype in ("fp32", precision):
        config = replace(config, training=replace(config.training, precision=precision))
        reason = " with loss scaling (this GPU has no bf16)" if precision == "fp16" else ""
        chosen.append(f"--precision {precision}{reason}")
        instead.append("--precision fp32")
    decay = config.optimizer.lr_decay_iters or config.training.train_iters
    warmup = min(MOST_WARMUP, decay // WARMUP_SHARE)
    if warmup and config.trains and "lr-warmup-iters" not in given:
        config = replace(config, optimizer=replace(config.optimizer, lr_warmup_iters=warmup))
        chosen.append(f"--lr-warmup-iters {warmup}")
        instead.append("--lr-warmup-iters 0")
    if not chosen:
        return config, ""
    return config, f"{' and '.join(chosen)}, the default on GPUs ({' '.join(instead)}: without)"
