"""Micro-batches of one data-parallel rank.

b micro-batch, s sequence, M micro-batches of a step, N data-parallel ranks.

The state of the loader is one number, `consumed_samples`: the global batch at that number holds the same samples in
every layout, with or without worker processes.
"""

import multiprocessing
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from megazero.config.batch_sizes import PADDING, BatchSizes, micro_batches
from megazero.config.run_options import MAX_NAMED_CORPORA
from megazero.data.blending import BlendedDataset
from megazero.data.samples import NO_TOKEN, Samples

# Steps that each worker process prepares ahead.
PREFETCHED_STEPS = 2
# How long a worker lives on after a TERM.
LAST_SECONDS = 30


class MicroBatch(NamedTuple):
    """`ids`, `labels` int64 [b, s]; `loss_mask` fp32 [b, s], 1 where a target counts; `samples` [b].

    A sample with the number `PADDING` consists of token 0, and none of its targets counts.

    `document_starts` int64 [b, s]: the position in its sample at which each token's document begins; None if no flag
    needs it. `corpora` [b]: the number of each sample's corpus, if the metrics list the corpora of a blend; else empty.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    samples: tuple[int, ...]
    document_starts: torch.Tensor | None = None
    corpora: tuple[int, ...] = ()


@dataclass(frozen=True)
class Assignment:
    """A rank's samples of a step: micro-batch m of rank r takes consumed + (m N + r) b + j, for j < b.

    Numbers beyond the global batch are `PADDING`, so that every rank has as many micro-batches as the first. See
    docs/decisions/0019-replicas-with-unequal-shares.md.
    """

    micro_batch_size: int
    sizes: BatchSizes
    dp_rank: int
    dp_size: int

    def __post_init__(self) -> None:
        assert self.micro_batch_size > 0, self
        assert 0 <= self.dp_rank < self.dp_size, self

    def samples(self, consumed: int) -> list[tuple[int, ...]]:
        """Sample numbers of this rank's step, M tuples of b."""
        b, batch = self.micro_batch_size, self.sizes.at(consumed)
        firsts = [(m * self.dp_size + self.dp_rank) * b for m in range(micro_batches(batch, b, self.dp_size))]
        return [tuple(consumed + i if i < batch else PADDING for i in range(first, first + b)) for first in firsts]


class Batches:
    """The batches of one rank, at any number of consumed samples.

    `seq_length`: tokens of a sample. `sizes`: of the global batches. `eod`: the end-of-document id, given with
    --eod-mask-loss: where it is the input, the target (the first token of an unrelated document) does not count, as in
    Megatron. None: every target counts. `document_end`: the same id, given with --reset-attention-mask or
    --reset-position-ids: it ends a document. `num_workers` processes read ahead, as long as batches are asked for in
    order; 0: read when asked. ValueErrors of the dataset come through from the workers.
    """

    def __init__(
        self,
        dataset: Samples,
        seq_length: int,
        sizes: BatchSizes,
        micro_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        *,
        eod: int | None = None,
        document_end: int | None = None,
        num_workers: int = 0,
    ) -> None:
        self.assignment = Assignment(micro_batch_size, sizes, dp_rank, dp_size)
        self._steps = _Steps(dataset, seq_length, self.assignment, eod, document_end)
        blended = isinstance(dataset, BlendedDataset) and len(dataset.datasets) <= MAX_NAMED_CORPORA
        self._blend = dataset if blended else None
        self._num_workers = num_workers
        self._ahead: Iterator[Any] | None = None
        self._next = -1  # the consumed samples at which `_ahead` stands

    def batch(self, consumed_samples: int) -> list[MicroBatch]:
        """The M micro-batches of the step that begins after `consumed_samples`."""
        if self._num_workers == 0 or multiprocessing.current_process().daemon:  # which may have no children
            step = self._steps.read(consumed_samples)
        else:
            step = self._read_ahead(consumed_samples)
        ids, labels, loss_mask, *starts = step
        numbers = self.assignment.samples(consumed_samples)
        found = [MicroBatch(*each) for each in zip(ids, labels, loss_mask, numbers, *starts, strict=True)]
        if (blend := self._blend) is None:
            return found
        return [
            each._replace(corpora=tuple(0 if i == PADDING else blend.locate(i)[0] for i in each.samples))
            for each in found
        ]

    def close(self) -> None:
        """End the worker processes; a later `batch` starts new ones."""
        self._ahead = None

    def _read_ahead(self, consumed: int) -> tuple[torch.Tensor, ...]:
        if self._ahead is None or consumed != self._next:
            self.close()
            self._ahead = iter(
                DataLoader(
                    self._steps,
                    batch_size=None,  # a key is a whole step
                    sampler=_Progress(consumed, self.assignment),
                    num_workers=self._num_workers,
                    prefetch_factor=PREFETCHED_STEPS,
                    worker_init_fn=_leave_signals_to_the_parent,
                )
            )
        try:
            step = next(self._ahead)
            if isinstance(step, str):
                raise ValueError(step)
        except BaseException:
            self.close()  # the step after a failed one is not the next of the workers
            raise
        self._next = consumed + self.assignment.sizes.at(consumed)
        return tuple(step)


class _Steps(Dataset[Any]):
    """A dataset as torch's DataLoader wants it: at key `consumed`, a rank's step, [M, b, s] each.

    That is ids, labels, loss mask and, where `document_end` is given, the starts of documents.
    """

    def __init__(
        self, dataset: Samples, seq_length: int, assignment: Assignment, masked: int | None, document_end: int | None
    ) -> None:
        self._dataset, self._assignment, self._masked = dataset, assignment, masked
        self._document_end, self._padding = document_end, np.full(seq_length + 1, NO_TOKEN)

    def __getitem__(self, consumed: int) -> tuple[torch.Tensor, ...] | str:
        """Call `read`; return the message of a ValueError, around which torch would put the worker's traceback."""
        try:
            return self.read(consumed)
        except ValueError as error:
            return str(error)

    def read(self, consumed: int) -> tuple[torch.Tensor, ...]:
        rows = self._assignment.samples(consumed)
        read = [[self._padding if i == PADDING else self._dataset[i] for i in row] for row in rows]
        tokens = torch.from_numpy(np.stack(read))  # [M, b, s + 1]
        starts = () if self._document_end is None else (document_starts(tokens[..., :-1], self._document_end),)
        loss_mask = (tokens[..., 1:] != NO_TOKEN).to(torch.float32)
        tokens.clamp_(min=0)  # any id does where none counts
        ids, labels = tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()
        if self._masked is not None:
            loss_mask[ids == self._masked] = 0.0
        return ids, labels, loss_mask, *starts


def document_starts(ids: torch.Tensor, end: int) -> torch.Tensor:
    """Find the place in its sample at which each token's document begins: [.., s] int64.

    A document ends with the id `end`, which belongs to it.
    """
    begins = torch.arange(ids.shape[-1]).expand(ids.shape).clone()
    begins[..., 1:][ids[..., :-1] != end] = 0
    return begins.cummax(-1).values


def _leave_signals_to_the_parent(_: int) -> None:
    """In a worker: a signal to the whole job is for the training process, whose step still needs this worker's batch.

    TERM is how that process ends a worker that hangs, so it works, but late.
    """
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(LAST_SECONDS))


class _Progress(Sampler[int]):
    """The consumed samples before each step, without end."""

    def __init__(self, consumed: int, assignment: Assignment) -> None:
        self._consumed, self._assignment = consumed, assignment

    def __iter__(self) -> Iterator[int]:
        consumed = self._consumed
        while True:
            yield consumed
            consumed += self._assignment.sizes.at(consumed)
