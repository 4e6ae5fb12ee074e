"""Norms of queries and keys, below autograd: of each head, or over all heads of a token.

Shapes: b micro-batch, s sequence, T = b s tokens, n/tp heads of this rank, g groups of keys of this rank, d head dim.
"""

from typing import NamedTuple

import torch

from megazero.engine.kernels.eager import Tensors, wide
from megazero.engine.model.layers.context import Context
from megazero.engine.model.layers.norm import Norm
from megazero.engine.model.layers.weight import WeightedModule
from megazero.engine.options.model_options import ModelOptions


class EachHead(NamedTuple):
    """Each head is normed by itself. All heads share a weight."""

    query: Norm
    key: Norm

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> tuple[Tensors, Tensors]:
        """q [b, s, n/tp, d], k [b, s, g, d] -> both normed, and the tensors to save for `backward`."""
        made, kept = [], []
        for norm, x in zip(self, (q, k), strict=True):
            rows = x.view(-1, x.shape[-1])
            y, *statistics = norm.normalise(rows)
            made.append(y.view_as(x))
            kept += [rows, *statistics]
        return tuple(made), tuple(kept)

    def backward(self, dq: torch.Tensor, dk: torch.Tensor, kept: Tensors) -> Tensors:
        """Hand over the weights' gradients. Return those of the inputs."""
        half = len(kept) // 2
        return tuple(
            norm.input_grad(dy.view(-1, dy.shape[-1]), None, *saved).view_as(dy)
            for norm, dy, saved in zip(self, (dq, dk), (kept[:half], kept[half:]), strict=True)
        )


class HeadsWeight(WeightedModule):
    """The weight of an RMSNorm over all heads of a token, sharded over tp like them.

    Args:
        heads: of the model.
        held: those that this rank computes with, if several ranks have the same; then the weight is replicated, and a
            sum over its elements has `share` of them from each rank.
    """

    def __init__(self, model: ModelOptions, context: Context, heads: int, held: slice | None = None) -> None:
        super().__init__()
        d = model.head_dim
        self.context, self.eps, self.width = context, model.norm_epsilon, heads * d
        if held is None:
            self.rows, self.share = slice(None), 1.0
            self.weight = context.weight(self.width, mean=1.0, sharded={0: "tp"})
        else:
            self.rows, self.share = slice(held.start * d, held.stop * d), heads / context.tp.size
            self.weight = context.weight(self.width, mean=1.0, summed=("tp",))

    @property
    def data(self) -> torch.Tensor:
        return self.weight.data[self.rows]

    def add_grad(self, gradient: torch.Tensor) -> None:
        """Hand over the gradient of `data`; that of the other rows is 0 here."""
        whole = gradient.new_zeros(self.weight.block.stored)
        whole[self.rows] = gradient
        self.weight.add_grad(whole)


class AllHeads(NamedTuple):
    """x / sqrt(mean(x^2) + eps) * weight over all heads of a token: once for queries, once for keys.

    Heads are sharded over tp, so the sums of queries and keys, [T, 2], are summed over tp: one all-reduce in forward
    and one in backward. Gradients of keys that several ranks have are parts of a sum, so their products with the
    normed keys are too.
    """

    query: HeadsWeight
    key: HeadsWeight

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> tuple[Tensors, Tensors]:
        """q [b, s, n/tp, d], k [b, s, g, d] -> both normed, and the tensors to save for `backward`."""
        xs, tp = tuple(x.flatten(2).flatten(0, 1) for x in (q, k)), self.query.context.tp
        exact = [x.to(wide(x)) for x in xs]
        means = [x.square().sum(-1) * (part.share / part.width) for x, part in zip(exact, self, strict=True)]
        rstd = tp.all_reduce_(torch.stack(means, -1)).add_(self.query.eps).rsqrt_()  # [T, 2]
        made = [
            (x * each * part.data).to(old.dtype).view_as(old)
            for x, each, part, old in zip(exact, rstd.split(1, -1), self, (q, k), strict=True)
        ]
        return tuple(made), (*xs, rstd)

    def backward(self, dq: torch.Tensor, dk: torch.Tensor, kept: Tensors) -> Tensors:
        """Hand over the weights' gradients. Return those of the inputs."""
        *xs, rstd = kept
        rstds, tp = rstd.split(1, -1), self.query.context.tp
        dys = [dy.view_as(x).to(rstd.dtype) for dy, x in zip((dq, dk), xs, strict=True)]
        normed = [x * each for x, each in zip(xs, rstds, strict=True)]
        dnormed = [dy * part.data for dy, part in zip(dys, self, strict=True)]
        means = [(dx * x).sum(-1) / part.width for dx, x, part in zip(dnormed, normed, self, strict=True)]
        whole = torch.stack(means, -1)  # [T, 2]
        summing = tp.start_all_reduce(whole)
        for dy, x, part in zip(dys, normed, self, strict=True):
            part.add_grad((dy * x).sum(0))
        summing.wait()
        return tuple(
            dx.sub_(x.mul_(mean * part.share)).mul_(each).to(dy.dtype).view_as(dy)
            for dx, x, mean, part, each, dy in zip(
                dnormed, normed, whole.split(1, -1), self, rstds, (dq, dk), strict=True
            )
        )
