"""The token table, and the logits and the loss over the vocabulary, all sharded over tp.

Shapes: b micro-batch, s sequence, T = b s tokens, T' those of the residual stream on this rank, h hidden, v vocabulary;
/tp = this rank's part.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from megazero.engine.kernels.eager import LogitMap, wide
from megazero.engine.mesh.collectives import MAX, AsyncTensor, Pending
from megazero.engine.model.layers.context import Context
from megazero.engine.model.layers.weight import GradWriter, Weight, handle_of
from megazero.engine.options.schema import ModelConfig


class VocabularyTable(nn.Module):
    """A [v, h] table whose rows are sharded over tp: the token table, the output matrix or, if tied, both.

    The last rows of a rank's part may be padding, which is no token.
    """

    def __init__(self, model: ModelConfig, context: Context) -> None:
        super().__init__()
        self.context = context
        v, h, std = model.vocab_size, model.hidden_size, model.init_method_std
        self.vocab_size, self.scale = v, model.embedding_scale
        self.weight = context.weight(v, h, sharded={0: "tp"}, std=std, decays=True, pads=True)
        self.first_row, self.num_rows = self.weight.block.offset[0], self.weight.block.shape[0]

    def localise(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return local row numbers, 0 for other ranks' tokens, and a mask of this rank's tokens. Shapes as ids."""
        rows = ids - self.first_row
        mine = (rows >= 0) & (rows < self.num_rows)
        return rows.masked_fill(~mine, 0), mine

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [b, s] -> their rows, times the embedding's scale, [T', h]"""
        rows, mine = self.localise(ids.flatten())
        return _Lookup.apply(rows, mine, self.scale, self.weight, self.context, self.weight.handle)


class Output(NamedTuple):
    """From hidden states to logits and loss, by a table, which may also be the token table.

    Attributes:
        bias: of the logits, sharded like the table; or None.
    """

    table: VocabularyTable
    bias: Weight | None
    to_logits: LogitMap

    @property
    def weights(self) -> tuple[Weight, ...]:
        return (self.table.weight,) if self.bias is None else (self.table.weight, self.bias)

    def products(self, x: torch.Tensor, num_rows: int | None = None) -> torch.Tensor:
        """x [.., h] -> this rank's products with rows of the table, plus the bias; of `num_rows`, or with padding."""
        weight, *biases = (weight.data[:num_rows] for weight in self.weights)
        return self.table.context.products.output(x, weight, *biases)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x [.., h] -> this rank's logits [.., v/tp] without padding. Has no gradient."""
        products = self.products(x, self.table.num_rows)
        return self.to_logits(products).to(products.dtype)

    def whole_logits(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, h] -> [n, v], the same on all of tp. Has no gradient."""
        part, tp, rows = self.logits(x), self.table.context.tp, self.table.weight.block.stored[0]
        padded = part.new_zeros(len(part), rows)
        padded[:, : part.shape[1]] = part
        whole = tp.all_gather(padded, part.new_empty(tp.size * len(part), rows)).view(tp.size, len(part), rows)
        return whole.transpose(0, 1).reshape(len(part), -1)[:, : self.table.vocab_size]

    def loss(self, x: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [T', h], labels [b, s] int64, weights [b, s] fp32 -> per sample the sum of weights x cross-entropy in nats.

        The result is [b] in fp64, the same on all of tp.
        """
        return _VocabularyLoss.apply(x, self, labels, weights, handle_of(self))


class _Lookup(torch.autograd.Function):
    """The sum over tp of each rank's rows, which are 0 for other ranks' tokens. Backward needs no weights."""

    @staticmethod
    def forward(ctx, rows, mine, scale, weight, context, handle):
        ctx.save_for_backward(rows, mine)
        ctx.weight, ctx.scale, ctx.stream, ctx.add_rows = weight, scale, context.stream, context.kernels.add_rows
        part = F.embedding(rows, weight.data).masked_fill_(~mine[..., None], 0)
        y = ctx.stream.start_reduce(part).wait()
        return y if scale == 1.0 else y.mul_(scale)  # behind the sum there are fewest tokens

    @staticmethod
    def backward(ctx, dy):
        rows, mine = ctx.saved_tensors

        def write(dy: torch.Tensor, rows: torch.Tensor, mine: torch.Tensor, out: torch.Tensor, add: bool) -> None:
            if not add:
                out.zero_()
            ctx.add_rows(out, rows, mine, dy)

        whole = ctx.stream.start_unshard(dy if ctx.scale == 1.0 else dy * ctx.scale).wait()
        ctx.weight.accumulate_grad(GradWriter(write, (whole, rows, mine)))
        return (None,) * 6


class _VocabularyLoss(torch.autograd.Function):
    """Logits, softmax and cross-entropy in one tensor of the logits' size, which backward overwrites by the gradient.

    Logits are never sent. Two all-reduces carry the maxima [T], and the sums and the labels' logits [2, T].
    """

    @staticmethod
    def forward(ctx, x, output, labels, weights, handle):
        context, table, to_logits = output.table.context, output.table, output.to_logits
        tp, kernels = context.tp, context.kernels.loss
        logits = output.products(context.stream.start_unshard(x).wait())  # [T, v/tp]
        allocation = context.tracker.allocate("logits", logits.numel() * logits.element_size())
        columns = labels.flatten() - table.first_row  # [T]
        peak, sums = kernels.sums(logits, columns, table.num_rows, to_logits)  # [T], [2, T]
        highest = tp.all_reduce_(peak.clone(), op=MAX)
        factor = (peak - highest).exp_()
        sums[0] *= factor
        tp.all_reduce_(sums)
        log_sum = sums[0].log() + highest
        loss = log_sum - sums[1]
        ctx.save_for_backward(x, logits, kernels.kept(factor, sums[0], log_sum, to_logits), columns, weights)
        ctx.output, ctx.context, ctx.allocation = output, context, allocation
        return (loss.view_as(weights) * weights).sum(-1, dtype=torch.float64)

    @staticmethod
    def backward(ctx, dloss):
        x, logits, kept, columns, weights = ctx.saved_tensors
        context, (table, bias, to_logits) = ctx.context, ctx.output
        unsharding = context.stream.start_unshard(x) if table.weight.trains else AsyncTensor(x, Pending())
        scale = (weights.to(kept.dtype) * dloss.to(kept.dtype)[:, None]).flatten()  # [T]
        dlogits = context.kernels.loss.grad_(logits, columns, table.num_rows, kept, scale, to_logits)
        products = context.products
        reducing = context.stream.start_reduce(products.input_grad(dlogits, table.weight.data))
        whole = unsharding.wait()
        table.weight.accumulate_grad(GradWriter(products.weight_grad, (whole, dlogits)))
        if bias is not None:
            bias.add_grad(dlogits.sum(0, dtype=wide(dlogits)))
        ctx.allocation.end()
        return reducing.wait(), None, None, None, None
