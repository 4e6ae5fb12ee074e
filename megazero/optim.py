"""AdamW on flat slices, the learning rate, the clip factor. Plain functions; the state belongs to the caller."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.optim.adamw import adamw

from megazero.config import OptimizerConfig

Moments = tuple[torch.Tensor, torch.Tensor]


def learning_rate(config: OptimizerConfig, iteration: int) -> float:
    """Of the update that ends iteration `iteration`, counted from 1; `lr_decay_iters` is resolved."""
    warmup, end = config.lr_warmup_iters, config.lr_decay_iters
    if iteration <= warmup:
        return config.lr * iteration / warmup
    if config.lr_decay_style == "constant":
        return config.lr
    done = min(1.0, (iteration - warmup) / (end - warmup))
    left = 1 - done if config.lr_decay_style == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return config.min_lr + (config.lr - config.min_lr) * left


def clip_factor(norm: float, clip: float) -> float:
    """What gradients of this norm are multiplied with. The norm is finite: a skip is decided before."""
    assert math.isfinite(norm), norm
    return min(1.0, clip / (norm + 1e-6)) if clip > 0 else 1.0


class Update(NamedTuple):
    """What one update is made of, the same for every unit."""

    config: OptimizerConfig
    lr: float
    step: int  # updates made so far, this one included: for the bias correction
    factor: float  # of the gradients: clipping


def adamw_(update: Update, master: torch.Tensor, gradient: torch.Tensor, moments: Moments, decayed: int) -> None:
    """Update `master` and `moments` in place, all [n] in fp32; the first `decayed` elements decay."""
    c = update.config
    for part, decay in ((slice(0, decayed), c.weight_decay), (slice(decayed, len(master)), 0.0)):
        if part.start == part.stop:
            continue
        adamw(
            [master[part]],
            [gradient[part]],
            [moments[0][part]],
            [moments[1][part]],
            [],
            [torch.tensor(float(update.step - 1), device=master.device)],  # the kernel counts this update itself
            fused=True,
            amsgrad=False,
            beta1=c.adam_beta1,
            beta2=c.adam_beta2,
            lr=update.lr,
            weight_decay=decay,
            eps=c.adam_eps,
            maximize=False,
        )
