"""A step's micro-batches: as the loader returns them, and on the device as layers read them.

Shapes: b micro-batch, s sequence, M micro-batches of a step.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F

from megazero.engine.memory.copies import upload
from megazero.engine.model.context_parallel.dealt import DealtTokens
from megazero.engine.model.documents import Documents
from megazero.engine.model.layers.context import Ahead, DeviceBatch, MicroBatchInfo, ResidualStream
from megazero.engine.model.scores import Scores
from megazero.engine.options.schema import DocumentOptions, StepConfig
from megazero.engine.plan.layout.dealing import Deal, deal_samples, dealt_multiple
from megazero.engine.plan.layout.topology import Layout


class MicroBatch(NamedTuple):
    """A micro-batch of b samples on the host. A sample that is padding consists of token 0, and no target counts."""

    ids: torch.Tensor  # [b, s] int64
    labels: torch.Tensor  # [b, s] int64
    loss_mask: torch.Tensor  # [b, s] fp32, 1 where the target counts
    samples: tuple[int, ...]  # global numbers; PADDING for padding
    # [b, s] int64: index at which each token's document begins; None if no flag needs it
    document_starts: torch.Tensor | None = None
    corpora: tuple[int, ...] = ()  # number of each sample's corpus; empty: one corpus

    def ahead(self, depth: int) -> Ahead:
        """Return the tokens that module `depth` of multi-token prediction reads and predicts, from 1, [b, s].

        Behind the end of the sample, and behind that of a token's document, no target counts.
        """
        ids, labels, mask = (
            F.pad(x[:, depth - back :], (0, depth - back))
            for x, back in ((self.labels, 1), (self.labels, 0), (self.loss_mask, 0))
        )
        if self.document_starts is not None:
            starts = F.pad(self.document_starts[:, depth:], (0, depth))
            mask = mask * (starts == self.document_starts)
        return Ahead(ids, labels, mask)


class Uploaded(NamedTuple):
    """A rank's micro-batches of a step, on the device."""

    micro_batches: list[DeviceBatch]
    # number of unmasked targets per corpus, then at each depth of multi-token prediction: [num_corpora + D] fp64
    targets: torch.Tensor
    corpora: torch.Tensor  # number of each sample's corpus, [M b] int64
    work: list[tuple[int, ...]]  # micro-batch -> pairs of query and key of each context-parallel rank; empty: one rank

    @property
    def imbalance(self) -> float | None:
        """Return how much longer attention takes than with even work, because ranks wait in every micro-batch."""
        if not self.work:
            return None
        return sum(map(max, self.work)) * len(self.work[0]) / sum(map(sum, self.work)) - 1


class Dealer(NamedTuple):
    """Deals the tokens of samples to the context-parallel ranks."""

    ranks: int
    rank: int
    multiple: int  # tokens of a rank are a multiple of this
    windows: tuple[int, ...]  # windows of the layers; 0: none

    @classmethod
    def of(cls, config: StepConfig, layout: Layout, rank: int) -> Self:
        return cls(layout.cp, rank, dealt_multiple(config), Scores.windows(config.model))

    def deal(self, length: int, samples: tuple[tuple[int, ...], ...]) -> tuple[DealtTokens, tuple[int, ...]]:
        """Deal a micro-batch, given the first tokens of each sample's documents. Return also each rank's work."""
        found = _deals(self, length, samples) if any(samples) else _deals_of_whole_samples(self, length, samples)
        work = tuple(sum(each) for each in zip(*(one.work for one in found), strict=True))
        return DealtTokens.of([one.ranges for one in found], self.rank, length), work


def _deals(dealer: Dealer, length: int, samples: tuple[tuple[int, ...], ...]) -> list[Deal]:
    return deal_samples(length, dealer.ranks, samples, windows=dealer.windows, multiple=dealer.multiple)


# Without documents, all micro-batches are dealt in the same way.
_deals_of_whole_samples = functools.lru_cache(maxsize=8)(_deals)


def upload_step(
    batches: Sequence[MicroBatch],
    *,
    stream: ResidualStream,
    documents: DocumentOptions,
    device: torch.device,
    dealer: Dealer,
    training: bool,
    num_corpora: int,
    by_sample: bool,
    depths: int = 0,
) -> Uploaded:
    """Copy this rank's part of a step's micro-batches to the device in one asynchronous copy.

    Args:
        by_sample: also the number of targets of each sample.
        depths: of multi-token prediction. Tokens are shifted before they are dealt.
    """
    assert batches, "no micro-batch"
    numbers = [number for batch in batches for number in batch.corpora or (0,) * len(batch.samples)]
    of_sample, host, works, made = torch.tensor(numbers), [], [], []
    counts: list[list[torch.Tensor]] = [[] for _ in range(1 + depths)]
    for batch in batches:
        found, dealt = _documents(batch), None
        parts = [Ahead(batch.ids, batch.labels, batch.loss_mask), *(batch.ahead(1 + k) for k in range(depths))]
        if dealer.ranks > 1:
            spans = found.spans if found is not None and documents.reset_attention_mask else ()
            firsts = tuple(tuple(span.first for span in spans if span.sample == i) for i in range(len(batch.samples)))
            dealt, work = dealer.deal(batch.ids.shape[1], firsts)
            works.append(work)
            parts = [part.gather(dealt.indices) for part in parts]
        for count, part in zip(counts, parts, strict=True):
            count.append(part.loss_mask.sum(-1, dtype=torch.float64))
        host += [
            *(x for part in parts for x in (part.ids, part.labels, part.loss_mask)),
            *([found.starts, found.bounds] if found else []),
            *([dealt.indices, dealt.rows] if dealt else []),
            *([batch.loss_mask.sum(-1, dtype=torch.float64)] if by_sample else []),
        ]
        made.append((batch, found, dealt))
    of_corpora, *of_depths = map(torch.cat, counts)
    targets = torch.stack([*sum_by_corpus(of_corpora, of_sample, num_corpora), *(each.sum() for each in of_depths)])
    targets, corpora, *there = upload([targets, of_sample, *host], device)
    micro_batches, arrived = [], iter(there)
    for batch, found, dealt in made:
        first, *ahead = (Ahead(next(arrived), next(arrived), next(arrived)) for _ in range(1 + depths))
        if found is not None:
            found = replace(found, starts=next(arrived), bounds=next(arrived))
        if dealt is not None:
            dealt = dealt._replace(indices=next(arrived), rows=next(arrived))
        info = MicroBatchInfo.of(
            batch.ids,
            batch.samples,
            stream,
            training=training,
            attention_documents=found if documents.reset_attention_mask else None,
            position_documents=found if documents.reset_position_ids else None,
            dealt=dealt,
        )
        micro_batches.append(
            DeviceBatch(
                ids=first.ids,
                labels=first.labels,
                loss_mask=first.loss_mask,
                tokens=info,
                targets=next(arrived) if by_sample else None,
                ahead=tuple(ahead),
            )
        )
    return Uploaded(micro_batches, targets, corpora, works)


def sum_by_corpus(values: torch.Tensor, corpora: torch.Tensor, num_corpora: int) -> torch.Tensor:
    """Sum values of a rank's samples, [M b], per corpus: [num_corpora], with the same bits every time."""
    if num_corpora == 1:
        return values.sum(0, keepdim=True)
    each = torch.arange(num_corpora, device=values.device)[:, None]
    return torch.where(each == corpora, values, 0.0).sum(1)


def _documents(batch: MicroBatch) -> Documents | None:
    """Return the micro-batch's documents; None if every sample is one document."""
    starts = batch.document_starts
    return None if starts is None or not starts.any() else Documents.of(starts)
