"""Global batch sizes of a run: one, or one that grows with the samples that were consumed."""

import math
from dataclasses import dataclass
from fractions import Fraction

from megazero.flags.config import Config


def data_parallel_size(world_size: int, pp: int = 1, tp: int = 1, cp: int = 1) -> int:
    """Return dp, given that pp x cp x tp divides `world_size`. Experts divide ranks that are counted here already."""
    return world_size // (pp * cp * tp)


@dataclass(frozen=True)
class BatchSizes:
    """The global batch of each iteration, a function of the samples consumed before it, as Megatron-LM's.

    It begins at `start`, grows by `increment` in equal stretches of `samples`, and is `full` from there on. Without a
    ramp, `start` is 0. The stretches are exact fractions, where Megatron-LM divides in floating point.
    """

    full: int
    start: int = 0
    increment: int = 0
    samples: int = 0

    def at(self, consumed: int) -> int:
        """Return the samples of the iteration that begins after `consumed`."""
        if not self.start or consumed >= self.samples:
            return self.full
        num_increments = (self.full - self.start) // self.increment
        return self.start + consumed * num_increments // self.samples * self.increment

    def total(self, iterations: int) -> int:
        """Return the samples of the first `iterations` iterations."""
        consumed = 0
        while iterations and (size := self.at(consumed)) < self.full:
            num_increments = (self.full - self.start) // self.increment
            stretch = (size - self.start) // self.increment + 1
            border = -(-stretch * self.samples // num_increments)  # consumed samples at which the next stretch begins
            steps = min(iterations, -(-(border - consumed) // size))
            consumed, iterations = consumed + steps * size, iterations - steps
        return consumed + iterations * self.full

    def iterations(self, samples: float) -> Fraction:
        """Return the iterations that `samples` take, the inverse of `total`; the last one may be a part."""
        low, high = 0, max(0, math.ceil(samples))
        while low < high:  # the most iterations with no more samples
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.total(middle) <= samples else (low, middle - 1)
        consumed = self.total(low)
        return low + (Fraction(samples) - consumed) / self.at(consumed)


def batch_sizes(config: Config) -> BatchSizes:
    """Return the global batch of each iteration."""
    return BatchSizes(config.training.global_batch_size, *config.training.rampup_batch_size)


def padding_samples(config: Config, dp: int) -> int:
    """Return the padding samples of `dp` replicas in a full global batch."""
    return config.micro_batches(dp) * config.training.micro_batch_size * dp - config.training.global_batch_size
