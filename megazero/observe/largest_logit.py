"""The largest attention logit of a sample: scores of its queries and keys once more, because kernels keep none.

Shapes: b micro-batch, s tokens of a sample, t those on this rank, n/tp heads of this rank, g groups of keys of this
rank, d head dim, r queries of a block.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from megazero.engine.memory.tracker import MemoryTracker
from megazero.engine.mesh.collectives import Axis
from megazero.engine.model.context_parallel.dealt import DealtTokens
from megazero.engine.model.layers.attention import Attention
from megazero.engine.model.layers.context import MicroBatchInfo
from megazero.planner.bytes.statistics import block_rows


@torch.no_grad()
def largest_logit(
    attention: Attention, heads: Sequence[torch.Tensor], tokens: MicroBatchInfo, tracker: MemoryTracker
) -> torch.Tensor:
    """Return the largest score that a query of a micro-batch's first sample has with a key that it sees, a scalar.

    Scores are scaled and under the soft cap. -inf: no token of the sample is on this rank.

    Args:
        heads: queries [b, n/tp, t, d], then keys [b, g, t, d].
    """
    core, dealt, documents = attention.core, tokens.dealt, tokens.attention_documents
    q, k = heads[0][:1], heads[1][:1]
    if dealt is not None and core.cp is not None:
        k = _all_keys(k, core.cp, dealt)
    n, g, s, d = q.shape[1], k.shape[1], k.shape[2], q.shape[3]
    keys = torch.arange(s, device=q.device)
    places = keys[None] if dealt is None else dealt.indices[:1]  # [1, t]
    own = None if documents is None else replace(documents, starts=documents.starts[:1])
    largest = q.new_full((), -torch.inf)
    rows = min(block_rows(n, s), q.shape[2])
    held = tracker.allocate("buffers", rows * s * (n * q.element_size() + 1))
    for at in range(0, q.shape[2], max(1, rows)):
        part, indices = q[:, :, at : at + rows], places[:, at : at + rows]
        scores = core.capped(part.reshape(1, g, -1, d), k).view(n, -1, s)  # queries of a group share its keys
        hidden = keys > indices[0, :, None]  # [r, s]
        first = core.scores.first_seen(scores, own, indices)
        if first is not None:
            hidden |= keys < first[0, :, None]
        largest = largest.maximum(scores.masked_fill_(hidden, -torch.inf).amax())
    held.end()
    return largest


def _all_keys(k: torch.Tensor, axis: Axis, dealt: DealtTokens) -> torch.Tensor:
    """Gather the keys of the first sample over context-parallel ranks: k [1, g, t, d] -> [1, g, s, d]"""
    most, own = dealt.most, k[0].transpose(0, 1)  # [t, g, d]
    part = own.new_zeros(most, *own.shape[1:])
    part[: len(own)] = own
    whole = part.new_empty(axis.size * most, *part.shape[1:])
    axis.all_gather(part, whole)
    each = len(dealt.ranges) * most  # rows of a rank in a buffer of all samples
    rows = dealt.rows[: dealt.length]
    return whole.index_select(0, rows // each * most + rows % each).transpose(0, 1)[None]
