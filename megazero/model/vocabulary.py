"""The token table and the loss over the vocabulary, both sharded over tp."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from megazero.comm.collectives import MAX, Pending
from megazero.config.schema import ModelConfig
from megazero.model.context import AsyncTensor, Context
from megazero.model.fused_ops import is_stand_in, wide
from megazero.model.weight import GradWriter

LOGIT_CHUNK_BYTES = 1 << 20  # rows of logits that are worked on together: what stays in a core's cache


class VocabularyTable(nn.Module):
    """A [v, h] table whose rows are sharded over tp. Rows that only pad this rank's part stand for no token.

    As the token table it is looked up; as the output matrix it gives logits; a tied one does both.
    """

    def __init__(self, model: ModelConfig, context: Context) -> None:
        super().__init__()
        self.context = context
        v, h, std = model.vocab_size, model.hidden_size, model.init_method_std
        self.weight = context.weight(v, h, tp_dim=0, std=std, decays=True, pads=True)
        self.first_row, self.num_rows = self.weight.block.offset[0], self.weight.block.shape[0]

    def localise(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids -> local row numbers (0 where foreign), and which are this rank's. Shapes as ids."""
        rows = ids - self.first_row
        mine = (rows >= 0) & (rows < self.num_rows)
        return rows.masked_fill(~mine, 0), mine

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [b, s] -> [T', h]"""
        c = self.context
        rows, mine = self.localise(ids.flatten())
        return _Lookup.apply(rows, mine, self.weight, c.stream, self.weight.handle)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x [.., h] -> this rank's logits [.., v/tp], without padding. For generation and tests; has no gradient."""
        return self.context.products.output(x, self.weight.data[: self.num_rows])


class _Lookup(torch.autograd.Function):
    """The sum over tp of rows of the local parts of the table, zero for foreign ids. Backward needs no weights."""

    @staticmethod
    def forward(ctx, rows, mine, weight, stream, handle):
        ctx.save_for_backward(rows, mine)
        ctx.weight, ctx.stream = weight, stream
        part = F.embedding(rows, weight.data).masked_fill_(~mine[..., None], 0)
        return stream.start_reduce(part).wait()

    @staticmethod
    def backward(ctx, dy):
        rows, mine = ctx.saved_tensors

        def write(dy: torch.Tensor, rows: torch.Tensor, mine: torch.Tensor, out: torch.Tensor, add: bool) -> None:
            if not add:
                out.zero_()
            ours = dy.masked_fill(~mine[..., None], 0).flatten(0, -2)  # selecting rows would wait for the GPU
            add_rows(out, rows.flatten(), ours.to(out.dtype))

        whole = ctx.stream.start_unshard(dy).wait()
        ctx.weight.accumulate_grad(GradWriter(write, (whole, rows, mine)))
        return None, None, None, None, None


def add_rows(out: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """out [v, h] += values [T, h] at `rows` [T], which may repeat; the same bits every time.

    On a GPU `index_add_` adds with atomics, in any order; an accumulating `index_put_` sorts the rows first, which on a
    CPU, where both add in order, only takes longer.
    """
    if out.device.type == "cpu":
        out.index_add_(0, rows, values)
    else:
        out.index_put_((rows,), values, accumulate=True)


class _VocabularyLoss(torch.autograd.Function):
    """Logits, softmax and cross-entropy, with one tensor of the logits' size: it holds the logits, then their
    exponentials, then their gradient. Two all-reduces of [T] (the maxima; sums and picked logits), never the logits.

    Each rank's exponentials are relative to its own maximum; `factor` turns them into probabilities.
    """

    @staticmethod
    def forward(ctx, x, weight, labels, weights, table, context, handle):
        tp = context.tp
        logits = context.products.output(context.stream.start_unshard(x).wait(), weight.data)  # [T, v/tp]
        allocation = context.tracker.allocate("logits", logits.numel() * logits.element_size())
        logits[:, table.num_rows :] = -torch.inf  # padding: probability 0, gradient 0
        rows, mine = (t.flatten() for t in table.localise(labels))
        peak = logits.new_empty(len(logits), dtype=wide(logits))  # [T]; all of the following in fp32, or in fp64
        stats = peak.new_empty(2, len(logits))  # sum of exponentials, logit of the label
        for part in _chunks(logits):
            chunk = logits[part]
            # clamped: a rank whose rows are all padding has no maximum
            peak[part] = top = chunk.amax(-1).to(peak.dtype).clamp_(min=torch.finfo(chunk.dtype).min)
            stats[1, part] = chunk.gather(-1, rows[part, None])[:, 0]
            chunk.sub_(top.to(chunk.dtype)[:, None]).exp_()
            stats[0, part] = chunk.sum(-1, dtype=peak.dtype)
        stats[1].masked_fill_(~mine, 0)
        highest = tp.all_reduce_(peak.clone(), op=MAX)
        factor = (peak - highest).exp_()
        stats[0] *= factor
        tp.all_reduce_(stats)
        loss = stats[0].log() + highest - stats[1]
        ctx.save_for_backward(x, logits, factor / stats[0], rows, mine, weights)
        ctx.weight, ctx.context, ctx.allocation = weight, context, allocation
        return (loss.view_as(weights) * weights).sum(-1, dtype=torch.float64)

    @staticmethod
    def backward(ctx, dloss):
        x, dlogits, factor, rows, mine, weights = ctx.saved_tensors
        trains = ctx.weight.trains
        unsharding = ctx.context.stream.start_unshard(x) if trains else AsyncTensor(x, Pending())
        scale = (weights.to(factor.dtype) * dloss.to(factor.dtype)[:, None]).flatten()  # [T]
        picked = (-scale).masked_fill_(~mine, 0).to(dlogits.dtype)[:, None]
        factor = (factor * scale).to(dlogits.dtype)[:, None]
        for part in _chunks(dlogits):
            dlogits[part].mul_(factor[part]).scatter_add_(-1, rows[part, None], picked[part])
        products = ctx.context.products
        reducing = ctx.context.stream.start_reduce(products.input_grad(dlogits, ctx.weight.data))
        whole = unsharding.wait()
        ctx.weight.accumulate_grad(GradWriter(products.weight_grad, (whole, dlogits)))
        ctx.allocation.end()
        return reducing.wait(), None, None, None, None, None, None


def _chunks(logits: torch.Tensor) -> list[slice]:
    rows = len(logits)
    if logits.device.type != "cpu" or is_stand_in(logits):
        return [slice(0, rows)]  # a GPU wants few, large kernels
    each = max(1, LOGIT_CHUNK_BYTES // (logits.shape[1] * logits.element_size()))
    return [slice(at, min(at + each, rows)) for at in range(0, rows, each)]


def vocabulary_loss(
    x: torch.Tensor, table: VocabularyTable, labels: torch.Tensor, weights: torch.Tensor, context: Context
) -> torch.Tensor:
    """Sum over each sample of weights x cross-entropy in nats, [b] in fp64, the same on all of tp.

    Shapes: x [T', h], labels [b, s] of token ids, weights [b, s] in fp32.
    """
    return _VocabularyLoss.apply(x, table.weight, labels, weights, table, context, table.weight.handle)
