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
from megazero.engine.mesh.collectives import MAX, AsyncTensor
from megazero.engine.model.layers.context import Context
from megazero.engine.model.layers.norm import Norm
from megazero.engine.model.layers.weight import GradWriter, Weight, handle_of
from megazero.engine.options.model_options import ModelOptions


class VocabularyTable(nn.Module):
    """A [v, h] table whose rows are sharded over tp: the token table, the output matrix or, if tied, both.

    The last rows of a rank's part may be padding, which is no token.
    """

    def __init__(self, model: ModelOptions, context: Context) -> None:
        super().__init__()
        self.context = context
        v, h, std = model.vocab_size, model.hidden_size, model.init_method_std
        self.vocab_size, self.scale = v, model.embedding_scale
        self.weight = context.weight(v, h, sharded={0: "tp"}, std=std, decays=True, pads=True)
        self.first_row, self.num_rows = self.weight.block.offset[0], self.weight.block.shape[0]

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [b, s] -> their rows, times the embedding's scale, [T', h]"""
        rows = ids.flatten() - self.first_row
        mine = (rows >= 0) & (rows < self.num_rows)
        rows = rows.masked_fill(~mine, 0)
        return _Lookup.apply(rows, mine, self.scale, self.weight, self.context, self.weight.handle)


class Output(NamedTuple):
    """From hidden states to logits and loss, by a table, which may also be the token table."""

    table: VocabularyTable
    bias: Weight | None  # of the logits, sharded like the table
    to_logits: LogitMap

    @property
    def weights(self) -> tuple[Weight, ...]:
        return (self.table.weight,) if self.bias is None else (self.table.weight, self.bias)

    def products(self, x: torch.Tensor, num_rows: int | None = None) -> torch.Tensor:
        """x [.., h] -> this rank's products with rows of the table, plus the bias; of `num_rows`, or with padding."""
        weight, *biases = (weight.data[:num_rows] for weight in self.weights)
        return self.table.context.products.output(x, weight, *biases)

    def whole_logits(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, h] -> [n, v], the same on all of tp. Has no gradient."""
        table, tp = self.table, self.table.context.tp
        products, rows = self.products(x, table.num_rows), table.weight.block.stored[0]
        part = products.new_zeros(len(products), rows)
        part[:, : products.shape[1]] = self.to_logits(products).to(products.dtype)
        whole = tp.all_gather(part, part.new_empty(tp.size * len(part), rows)).view(tp.size, len(part), rows)
        return whole.transpose(0, 1).reshape(len(part), -1)[:, : table.vocab_size]

    def loss(
        self, x: torch.Tensor, norm: Norm, labels: torch.Tensor, weights: torch.Tensor, seed: torch.Tensor | None
    ) -> torch.Tensor:
        """x [T', h], labels [b, s] int64, weights [b, s] fp32 -> per sample the sum of weights x cross-entropy in nats.

        The result is [b] in fp64, the same on all of tp. With a graph, all gradients are computed at once.

        Args:
            norm: of x, before the products.
            seed: d objective / d loss, a scalar, the same for every sample; None: there will be no backward.
        """
        if not torch.is_grad_enabled():
            seed = None
        return _VocabularyLoss.apply(x, norm, self, labels, weights, seed, handle_of(norm, self))

    def chunks(self, num_tokens: int) -> list[slice]:
        """Return the tokens whose logits are in memory together: --loss-chunk-tokens."""
        each = self.table.context.loss_chunk or max(1, num_tokens)
        return [slice(at, min(at + each, num_tokens)) for at in range(0, num_tokens, each)]


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
    """Norm, logits, softmax and cross-entropy, a chunk of tokens at a time; and all of their gradients.

    The divisor of the loss is known before the forward, so a chunk's gradients are final at once: they overwrite its
    logits, and these are freed before the next chunk. Backward returns the gradient of x. Logits are never sent: two
    all-reduces of a chunk of C tokens carry the maxima [C], and the sums and the labels' logits [2, C].
    """

    @staticmethod
    def forward(ctx, x, norm, output, labels, weights, seed, handle):
        context = output.table.context
        normed, *statistics = norm.normalise(x)
        whole, labels = context.stream.start_unshard(normed).wait(), labels.flatten()
        wanted = seed is not None and (ctx.needs_input_grad[0] or any(weight.trains for weight in norm.weights))
        grad = None
        if seed is not None:
            exact = wide(whole)
            grad = _ChunkGradients(output, whole, scale=weights.to(exact) * seed.to(exact), wanted=wanted)
        parts = output.chunks(len(whole))
        losses = [_chunk_losses(output, whole[part], labels[part], part=part, grad=grad) for part in parts]
        if wanted:
            dx = norm.input_grad(grad.reducing.wait(), None, x, *statistics)
            if ctx.needs_input_grad[0]:
                ctx.save_for_backward(dx)
        return (torch.cat(losses).view_as(weights) * weights).sum(-1, dtype=torch.float64)

    @staticmethod
    def backward(ctx, dloss):
        return *(ctx.saved_tensors or (None,)), *(None,) * 6


class SoftmaxSums(NamedTuple):
    """Sums over the whole vocabulary for C tokens, [C] each, in fp32 or wider."""

    total: torch.Tensor  # of the exponentials, relative to the maximum
    picked: torch.Tensor  # the labels' logits
    log_sum: torch.Tensor  # the log of the sum of the exponentials
    factor: torch.Tensor  # from exponentials relative to this rank's maximum to those relative to the maximum


def softmax_sums(output: Output, logits: torch.Tensor, columns: torch.Tensor) -> SoftmaxSums:
    """logits [C, v/tp], which are overwritten; columns [C]: labels as columns of this rank"""
    table, tp = output.table, output.table.context.tp
    peak, sums = table.context.kernels.loss.sums(logits, columns, table.num_rows, output.to_logits)  # [C], [2, C]
    highest = tp.all_reduce_(peak.clone(), op=MAX)
    factor = (peak - highest).exp_()
    sums[0] *= factor
    tp.all_reduce_(sums)
    return SoftmaxSums(sums[0], sums[1], sums[0].log() + highest, factor)


def _chunk_losses(
    output: Output, x: torch.Tensor, labels: torch.Tensor, part: slice, grad: _ChunkGradients | None
) -> torch.Tensor:
    """x [C, h], labels [C]: tokens `part` -> their losses, [C] in fp32 or wider; `grad` takes their gradients."""
    table, to_logits = output.table, output.to_logits
    kernels = table.context.kernels.loss
    logits = output.products(x)  # [C, v/tp]
    allocation = table.context.tracker.allocate("logits", logits.numel() * logits.element_size())
    columns = labels - table.first_row  # [C]
    sums = softmax_sums(output, logits, columns)
    if grad is not None:
        kept = kernels.kept(sums.factor, sums.total, sums.log_sum, to_logits)
        grad.add(part, kernels.grad_(logits, columns, table.num_rows, kept, grad.scale[part], to_logits))
    allocation.end()
    return sums.log_sum - sums.picked


class _ChunkGradients:
    """The gradients of a micro-batch's products, from those of its chunks."""

    reducing: AsyncTensor  # the sum over tp of the gradient of `whole`, in flight after the last chunk

    def __init__(self, output: Output, whole: torch.Tensor, scale: torch.Tensor, wanted: bool) -> None:
        """scale [T]: d objective / d loss, in fp32 or wider. wanted: compute the gradient of `whole` [T, h]."""
        self.output, self.whole, self.scale = output, whole, scale.flatten()
        self.dwhole = torch.empty_like(whole) if wanted else None

    def add(self, part: slice, dlogits: torch.Tensor) -> None:
        """dlogits [C, v/tp]"""
        table, bias, _ = self.output
        context, products = table.context, table.context.products
        if self.dwhole is not None:
            self.dwhole[part] = products.input_grad(dlogits, table.weight.data)
            if part.stop == len(self.whole):  # while the last weight gradient is computed
                self.reducing = context.stream.start_reduce(self.dwhole)
        table.weight.accumulate_grad(GradWriter(products.weight_grad, (self.whole[part], dlogits)))
        if bias is not None:
            bias.add_grad(dlogits.sum(0, dtype=wide(dlogits)))
