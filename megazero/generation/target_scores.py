"""Scores of targets: cross-entropies, and which labels are the likeliest tokens.

Shapes: b micro-batch, s sequence, T' tokens of the residual stream on this rank, h hidden, C tokens whose logits are in
memory together, v vocabulary; /tp = this rank's part.
"""

import torch

from megazero.engine.kernels.eager import wide
from megazero.engine.mesh.collectives import MAX, MIN
from megazero.engine.model.layers.context import DeviceBatch
from megazero.engine.model.layers.vocabulary import Output, VocabularyTable, softmax_sums
from megazero.engine.model.stage import Head


def score_batch(head: Head, x: torch.Tensor | None, batch: DeviceBatch, output: bool) -> torch.Tensor:
    """Return `target_scores` of a micro-batch's targets that count, flat, [2 b s]."""
    assert x is not None
    return target_scores(head, x, batch.labels, batch.loss_mask).flatten()


def target_scores(head: Head, x: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """x [T', h], labels [b, s] int64 -> [2, b, s]: cross-entropies in nats; 1 where labels are likeliest, else 0.

    In fp32 or wider, the same on all of tp. Of equally likely tokens the first counts. Has no gradient.

    Args:
        weights: [b, s]; where they are 0, no logits are computed, and the result is 0.
    """
    output = head.vocabulary
    normed, *_ = head.norm.normalise(x)
    whole, flat = output.table.context.stream.start_unshard(normed).wait(), labels.flatten()
    rows = weights.flatten().nonzero()[:, 0]
    found = normed.new_zeros(2, len(flat), dtype=wide(normed))
    for part in (rows[chunk] for chunk in output.chunks(len(rows))):
        found[:, part] = _chunk_scores(output, whole[part], flat[part])
    return found.view(2, *labels.shape)


def _chunk_scores(output: Output, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """x [C, h], labels [C] -> [2, C], see `target_scores`."""
    table = output.table
    logits = output.products(x)  # [C, v/tp]
    allocation = table.context.tracker.allocate("logits", logits.numel() * logits.element_size())
    likeliest = _likeliest(table, logits)
    sums = softmax_sums(output, logits, labels - table.first_row)
    allocation.end()
    return torch.stack([sums.log_sum - sums.picked, (likeliest == labels).to(sums.log_sum.dtype)])


def _likeliest(table: VocabularyTable, logits: torch.Tensor) -> torch.Tensor:
    """logits [C, v/tp] -> the first of the likeliest tokens of the whole vocabulary, [C] int64."""
    tp = table.context.tp
    logits[:, table.num_rows :] = -torch.inf  # padding
    peak, columns = logits.max(-1)
    highest = tp.all_reduce_(peak.to(wide(peak), copy=True), op=MAX)
    mine = peak.to(highest.dtype) == highest
    return tp.all_reduce_(torch.where(mine, columns + table.first_row, table.vocab_size), op=MIN)
