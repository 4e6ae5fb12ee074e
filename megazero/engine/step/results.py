"""Results of a training step, as values."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch


class StepResult(NamedTuple):
    """Result of one iteration, the same on all ranks except for the bytes."""

    loss: float  # nats per target, before the update
    grad_norm: float
    lr: float
    loss_scale: float  # scale of this iteration's gradients
    skipped: bool  # no update, because the gradients are not finite or no target counts
    skip_reason: str | None  # if skipped
    gradient_bytes: int  # just before the update
    imbalance: float | None = None  # None without context parallelism; see `engine.plan.layout.dealing`
    loss_by_corpus: tuple[float | None, ...] = ()  # None: no target of the corpus counts; empty: one corpus
    targets: float = 0.0  # of the global batch, that count
    routed: Sequence[float] = ()  # statistics of the routers, see `Routers.summed`; empty without experts
    mtp_losses: tuple[float, ...] = ()  # of each depth of multi-token prediction, nats per target


class Computed(NamedTuple):
    """Numbers of a step's gradients, read by the host; the same on all ranks."""

    targets_by_corpus: list[float]
    loss_sums: list[float]  # sum of the losses of a corpus' targets
    mtp_losses: tuple[float, ...]  # see `StepResult`
    norm: float
    choices: torch.Tensor  # statistics of the routers, see `Routers.summed`
    routed: list[float]  # the same on the host
    seeds: torch.Tensor  # d objective / d loss of each depth, [1 + D] fp64

    @property
    def targets(self) -> float:
        return sum(self.targets_by_corpus)

    @property
    def loss(self) -> float:
        return sum(self.loss_sums) / self.targets if self.targets else math.nan

    @property
    def means(self) -> tuple[float | None, ...]:
        """Mean loss of each corpus; None if none of its targets counts."""
        return tuple(loss / n if n else None for loss, n in zip(self.loss_sums, self.targets_by_corpus, strict=True))
