"""The learning rate, the clip factor, the loss scale: plain functions and values."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from megazero.engine.options.schema import OptimizerConfig, TrainingConfig

# Fraction of the way from --min-lr to --lr, as a function of the fraction of the decay that is done: 1 at 0, 0 at 1.
DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "exponential": lambda done: 2 * 0.5**done - 1,
    "minus_sqrt": lambda done: 1 - math.sqrt(done),
}


def learning_rate(config: OptimizerConfig, iteration: int) -> float:
    """Return the learning rate of iteration `iteration`, counted from 1; `lr_decay_iters` is resolved.

    The shapes are those of Megatron-LM's OptimizerParamScheduler.
    """
    warmup, end, style = config.lr_warmup_iters, config.lr_decay_iters, str(config.lr_decay_style)
    if iteration <= warmup:
        return config.lr * iteration / warmup
    if style == "constant":
        return config.lr
    if style == "inverse-square-root":
        decayed = config.lr * math.sqrt(max(1, warmup) / iteration)
        return max(config.min_lr, decayed) if iteration <= end else config.min_lr
    begin = warmup
    if style == "wsd":
        begin, style = end - config.lr_wsd_decay_iters, config.lr_wsd_decay_style
    if iteration <= begin:
        return config.lr  # min_lr + (lr - min_lr) may round to its neighbour
    done = min(1.0, (iteration - begin) / (end - begin))
    return config.min_lr + (config.lr - config.min_lr) * DECAYS[style](done)


def clip_factor(norm: float, clip: float) -> float:
    """Return the factor for gradients of this norm, which is finite."""
    assert math.isfinite(norm), norm
    return min(1.0, clip / (norm + 1e-6)) if clip > 0 else 1.0


@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scaling (Micikevicius 2018) with Megatron's hysteresis; a value, replaced at every iteration.

    An overflow reduces `left` by 1; at 0 the scale halves. After `window` iterations without an overflow the scale
    doubles, and `left` is `hysteresis` again.
    """

    value: float
    least: float
    window: int
    hysteresis: int
    left: int
    good: int = 0  # iterations since the last overflow or doubling

    @classmethod
    def of(cls, config: TrainingConfig) -> Self | None:
        """Return the loss scale of fp16; None for other precisions, whose range is at least fp32's."""
        if config.precision != "fp16":
            return None
        return cls(
            value=config.initial_loss_scale,
            least=config.min_loss_scale,
            window=config.loss_scale_window,
            hysteresis=config.hysteresis,
            left=config.hysteresis,
        )

    @property
    def exhausted(self) -> bool:
        """The scale cannot be lowered at the next overflow."""
        return self.value <= self.least and self.left <= 1

    def after(self, overflow: bool) -> Self:
        """Return the loss scale of the next iteration."""
        if overflow:
            left = max(0, self.left - 1)
            value = max(self.least, self.value / 2) if left == 0 else self.value
            return replace(self, value=value, left=left, good=0)
        if self.good + 1 == self.window:
            return replace(self, value=2 * self.value, left=self.hysteresis, good=0)
        return replace(self, good=self.good + 1)
