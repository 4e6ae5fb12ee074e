"""A step's micro-batches: as the loader returns them, and on the device as layers read them.

Shapes: b micro-batch, s sequence, M micro-batches of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch

from megazero.config.schema import DataConfig
from megazero.memory.upload import upload
from megazero.model.layers.context import DeviceBatch, MicroBatchInfo, ResidualStream
from megazero.model.layers.documents import Documents


class Batch(Protocol):
    """A micro-batch of b samples on the host; see `data.loader.MicroBatch`."""

    ids: torch.Tensor  # [b, s] int64
    labels: torch.Tensor  # [b, s] int64
    loss_mask: torch.Tensor  # [b, s] fp32, 1 where the target counts
    samples: tuple[int, ...]  # global numbers
    document_starts: torch.Tensor | None  # [b, s] int64, index at which each token's document begins; None: unused
    corpora: tuple[int, ...]  # number of each sample's corpus; empty: one corpus


class Uploaded(NamedTuple):
    """A rank's micro-batches of a step, on the device."""

    micro_batches: list[DeviceBatch]
    targets: torch.Tensor  # number of unmasked targets per corpus, counted on the host: [num_corpora] fp64
    corpora: torch.Tensor  # number of each sample's corpus, [M b] int64


def upload_step(
    batches: Sequence[Batch],
    stream: ResidualStream,
    data: DataConfig,
    device: torch.device,
    *,
    training: bool,
    num_corpora: int,
) -> Uploaded:
    """Copy a step's micro-batches to the device in one asynchronous copy."""
    assert batches, "no micro-batch"
    numbers = [number for batch in batches for number in batch.corpora or (0,) * len(batch.samples)]
    counts = torch.cat([batch.loss_mask.sum(-1, dtype=torch.float64) for batch in batches])
    of_sample = torch.tensor(numbers)
    documents = [_documents(batch) for batch in batches]
    host = [sum_by_corpus(counts, of_sample, num_corpora), of_sample]
    for batch, found in zip(batches, documents, strict=True):
        host += [batch.ids, batch.labels, batch.loss_mask, *([found.starts, found.bounds] if found else [])]
    targets, corpora, *parts = upload(host, device)
    there, arrived = [], iter(parts)
    for batch, found in zip(batches, documents, strict=True):
        ids, labels, mask = next(arrived), next(arrived), next(arrived)
        if found is not None:
            found = replace(found, starts=next(arrived), bounds=next(arrived))
        info = MicroBatchInfo.of(
            batch.ids,
            batch.samples,
            stream,
            training=training,
            attention_documents=found if data.reset_attention_mask else None,
            position_documents=found if data.reset_position_ids else None,
        )
        there.append(DeviceBatch(ids, labels, mask, info))
    return Uploaded(there, targets, corpora)


def sum_by_corpus(values: torch.Tensor, corpora: torch.Tensor, num_corpora: int) -> torch.Tensor:
    """Sum values of a rank's samples, [M b], per corpus: [num_corpora], with the same bits every time."""
    if num_corpora == 1:
        return values.sum(0, keepdim=True)
    each = torch.arange(num_corpora, device=values.device)[:, None]
    return torch.where(each == corpora, values, 0.0).sum(1)


def _documents(batch: Batch) -> Documents | None:
    """Return the micro-batch's documents; None if every sample is one document."""
    starts = batch.document_starts
    return None if starts is None or not starts.any() else Documents.of(starts)
