"""Micro-batches of one data-parallel rank.

b micro-batch, s sequence, M micro-batches of a step, N data-parallel ranks.

The state of the loader is one number, `consumed_samples`: the global batch at that number holds the same samples in
every layout, with or without threads that read ahead.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from megazero.data.blending import BlendedDataset
from megazero.data.indexed import Int64s
from megazero.data.samples import NO_TOKEN, Sample, Samples
from megazero.engine.options.batch_sizes import PADDING, micro_batches
from megazero.engine.step.batch import MicroBatch
from megazero.flags.batch_ramp import BatchSizes
from megazero.flags.corpus_flags import MAX_NAMED_CORPORA

# Steps that each thread reads ahead.
PREFETCHED_STEPS = 2


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
    --reset-position-ids: it ends a document. `num_workers` threads read ahead, as long as batches are asked for in
    order; 0: read when asked. See docs/decisions/0024-batches-are-read-by-threads.md.
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
        self._dataset, self._masked, self._document_end = dataset, eod, document_end
        self._padding = Sample(np.full(seq_length + 1, NO_TOKEN))
        blend = dataset if isinstance(dataset, BlendedDataset) else None
        self._blend = blend if blend is not None and len(blend.datasets) <= MAX_NAMED_CORPORA else None
        self._num_workers = num_workers
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: deque[Future[list[MicroBatch]]] = deque()  # steps in order
        self._first = self._last = -1  # the consumed samples of the first step in `_ahead`, and of the one after them

    def batch(self, consumed_samples: int) -> list[MicroBatch]:
        """The M micro-batches of the step that begins after `consumed_samples`. ValueError of the dataset."""
        if self._num_workers == 0:
            return self._read(consumed_samples)
        if self._pool is None or consumed_samples != self._first:
            self.close()
            self._pool = ThreadPoolExecutor(self._num_workers, "data")
            self._first = self._last = consumed_samples
        sizes = self.assignment.sizes
        while len(self._ahead) <= PREFETCHED_STEPS * self._num_workers:
            self._ahead.append(self._pool.submit(self._read, self._last))
            self._last += sizes.at(self._last)
        self._first += sizes.at(self._first)
        return self._ahead.popleft().result()

    def close(self) -> None:
        """End the threads, without waiting for their reads; a later `batch` starts new ones."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool = None
        self._ahead.clear()

    def _read(self, consumed: int) -> list[MicroBatch]:
        return [self._micro_batch(numbers) for numbers in self.assignment.samples(consumed)]

    def _micro_batch(self, numbers: tuple[int, ...]) -> MicroBatch:
        # In numpy, because torch would start a second team of OpenMP threads for the thread that reads.
        samples = [self._padding if i == PADDING else self._dataset[i] for i in numbers]
        tokens = np.stack([sample.ids for sample in samples])  # [b, s + 1]
        starts, blend = self._document_starts(samples), self._blend
        loss_mask = (tokens[:, 1:] != NO_TOKEN).astype(np.float32)
        for row, sample in zip(loss_mask, samples, strict=True):
            if sample.counts is not None:
                row *= sample.counts
        if self._masked is not None:
            loss_mask[tokens[:, :-1] == self._masked] = 0.0
        tokens.clip(min=0, out=tokens)  # any id does where none counts
        ids, labels, counts = map(torch.from_numpy, (tokens[:, :-1].copy(), tokens[:, 1:].copy(), loss_mask))
        corpora = tuple(0 if i == PADDING else blend.locate(i)[0] for i in numbers) if blend is not None else ()
        return MicroBatch(
            ids=ids, labels=labels, loss_mask=counts, samples=numbers, document_starts=starts, corpora=corpora
        )

    def _document_starts(self, samples: Sequence[Sample]) -> torch.Tensor | None:
        """Return the place at which each input's document begins, [b, s] int64; None if no flag needs it."""
        found = [self._starts(sample) for sample in samples]
        if all(each is None for each in found):
            return None
        # Padding of a batch is one document.
        return torch.from_numpy(np.stack([np.zeros_like(self._padding.ids[1:]) if x is None else x for x in found]))

    def _starts(self, sample: Sample) -> Int64s | None:
        if sample.starts is not None or self._document_end is None:
            return sample.starts
        return document_starts(sample.ids[:-1], self._document_end)


def document_starts(ids: Int64s, end: int) -> Int64s:
    """Find the place in its sample at which each token's document begins: [.., s] int64.

    A document ends with the id `end`, which belongs to it.
    """
    begins = np.zeros_like(ids)
    begins[..., 1:] = np.where(ids[..., :-1] == end, np.arange(1, ids.shape[-1]), 0)
    return np.maximum.accumulate(begins, axis=-1)
