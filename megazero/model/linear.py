"""Linear layers, sharded over tp.

Activations are [T, h], the T = b s tokens of a micro-batch one below the other. The residual stream holds all of them
on every tensor-parallel rank, or with sequence parallelism 1/tp of them: see `ResidualStream`.

Weights never collect a `.grad`. Every Function that uses one hands its gradient to `Weight.accumulate_grad(write)`,
which calls `write(out, add)` with `out` the weight's window of a flat gradient buffer: to be written (add False: the
first contribution) or added to.

Shapes: b micro-batch, s sequence, T tokens, T' those of the residual stream on this rank, h hidden; /tp = this rank's
part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from megazero.comm.collectives import Pending
from megazero.model.context import AsyncTensor, Context, RecomputedInput, ResidualStream
from megazero.model.matmul import Products, as_matrix, write_or_add
from megazero.model.weight import GradWriter, Weight
from megazero.plan.parameters import GradientGroup


class _Affine(NamedTuple):
    """x @ weight.T + bias, of the rows `rows` (along dim 0) where this rank computes with a part of its shard."""

    weight: Weight
    bias: Weight | None
    rows: slice | None = None

    @property
    def matrix(self) -> torch.Tensor:
        return as_matrix(self.weight.data if self.rows is None else self.weight.data[self.rows])

    def output(self, x: torch.Tensor, products: Products) -> torch.Tensor:
        added = None if self.bias is None else self.bias.data
        if added is not None:
            added = (added if self.rows is None else added[self.rows]).flatten()
        return products.output(x, self.matrix, added)

    def add_gradients(self, x: torch.Tensor, dy: torch.Tensor, products: Products, bias: bool) -> None:
        self.weight.accumulate_grad(GradWriter(self._of_rows(products.weight_grad), (x, dy)))
        if bias and self.bias is not None:
            self.bias.accumulate_grad(GradWriter(self._of_rows(_write_sum), (dy.sum(0),)))

    def _of_rows(self, write: Callable[..., None]) -> Callable[..., None]:
        """`write` for the rows that are computed with; the gradient of the others is zero."""
        rows = self.rows
        if rows is None:
            return write

        def write_rows(*args: Any) -> None:
            *tensors, out, add = args
            if not add:
                out.zero_()
            write(*tensors, out[rows], add)

        return write_rows


def _write_sum(gradient: torch.Tensor, out: torch.Tensor, add: bool) -> None:
    write_or_add(out, add, gradient)


class _Linear(torch.autograd.Function):
    """Products of one input with several weights. See Note [the Weight itself].

    `stream`: where the input is the residual stream, else None. Of a sharded stream this rank's tokens alone are kept,
    and gathered again in backward. Nothing waits: the tokens arrive while the input gradient is computed, and that is
    summed while the weight gradients are.
    """

    @staticmethod
    def forward(
        ctx,
        x: torch.Tensor,
        affines: tuple[_Affine, ...],
        stream: ResidualStream | None,
        recomputed: RecomputedInput | None,
        products: Products,
        *handles: torch.Tensor,
    ):
        ctx.save_for_backward(x if recomputed is None else recomputed.source)
        ctx.prepare, ctx.products = recomputed and recomputed.prepare, products
        ctx.affines, ctx.stream, ctx.num_handles = affines, stream, len(handles)
        whole = x if stream is None else stream.start_unshard(x).wait()
        return tuple(affine.output(whole, products) for affine in affines)

    @staticmethod
    def backward(ctx, *dys):
        (x,) = ctx.saved_tensors
        trains = any(affine.weight.trains for affine in ctx.affines)
        if ctx.prepare is not None and trains:
            x = ctx.prepare(x)
        unsharding = ctx.stream.start_unshard(x) if ctx.stream is not None and trains else AsyncTensor(x, Pending())
        reducing = None
        if ctx.needs_input_grad[0]:
            dx = None
            for affine, dy in zip(ctx.affines, dys, strict=True):
                part = ctx.products.input_grad(dy, affine.matrix)
                dx = part if dx is None else dx.add_(part)
            reducing = ctx.stream.start_reduce(dx) if ctx.stream is not None else AsyncTensor(dx, Pending())
        whole = unsharding.wait()
        for affine, dy in zip(ctx.affines, dys, strict=True):
            affine.add_gradients(whole, dy, ctx.products, bias=ctx.stream is not None)  # else `SumParts` has the bias
        return reducing and reducing.wait(), *[None] * (4 + ctx.num_handles)


def _linear(
    x: torch.Tensor,
    affines: tuple[_Affine, ...],
    stream: ResidualStream | None,
    recomputed: RecomputedInput | None,
    products: Products,
) -> tuple[torch.Tensor, ...]:
    weights = [weight for affine in affines for weight in (affine.weight, affine.bias)]
    handles = [weight.handle for weight in weights if weight is not None]
    return _Linear.apply(x, affines, stream, recomputed, products, *handles)


class SumParts(torch.autograd.Function):
    """Sum the partial products over tp. The partial product is new and not referenced elsewhere.

    The bias, if there is one, is in the parts already; its gradient is of this rank's tokens.
    """

    @staticmethod
    def forward(ctx, part, bias, stream, output, *handles):
        ctx.bias, ctx.stream, ctx.num_handles = bias, stream, len(handles)
        if not output:  # a recompute: it is never read
            return part.view(-1, part.shape[-1])[: len(stream.tokens(part.numel() // part.shape[-1]))]
        return stream.start_reduce(part).wait().view(-1, part.shape[-1])

    @staticmethod
    def backward(ctx, dy):
        unsharding = ctx.stream.start_unshard(dy)
        if ctx.bias is not None:
            ctx.bias.add_grad(dy.sum(0))
        return unsharding.wait(), *[None] * (3 + ctx.num_handles)


class ColumnLinear(nn.Module):
    """y [T, out/tp] = x [T', in] of all tokens @ weight[out/tp, in].T + bias[out/tp]

    Args:
        out: the weight's shape but for its last dim, such as (heads, 3, d).
        tp_dim: which of these dims is sharded.
        rows: of dim 0, which this rank computes with, where too few for tp are replicated (tp_dim None).
    """

    def __init__(
        self,
        context: Context,
        inner: int,
        *out: int,
        std: float,
        bias: bool,
        tp_dim: int | None = 0,
        rows: slice | None = None,
    ) -> None:
        super().__init__()
        self.context, self.rows = context, rows
        group = GradientGroup.DP if rows is None else GradientGroup.DP_TP
        self.weight = context.weight(*out, inner, tp_dim=tp_dim, std=std, decays=True, group=group)
        self.bias = context.weight(*out, tp_dim=tp_dim, group=group) if bias else None

    def forward(self, x: torch.Tensor, recomputed: RecomputedInput | None = None) -> torch.Tensor:
        return column_linears((self,), x, recomputed)[0]


def column_linears(
    layers: Sequence[ColumnLinear], x: torch.Tensor, recomputed: RecomputedInput | None = None
) -> tuple[torch.Tensor, ...]:
    """Apply several column-linear layers to one input [T', in], which is gathered, and its gradient summed, once."""
    c = layers[0].context
    return _linear(
        x, tuple(_Affine(layer.weight, layer.bias, layer.rows) for layer in layers), c.stream, recomputed, c.products
    )


class RowLinear(nn.Module):
    """y [T', out] = sum over tp of x [T, in/tp] @ weight[out, in/tp].T, + bias[out], which the first rank adds."""

    def __init__(self, context: Context, inner: int, out: int, *, std: float, bias: bool) -> None:
        super().__init__()
        self.context = context
        self.weight = context.weight(out, inner, tp_dim=1, std=std, decays=True)
        self.bias = context.weight(out) if bias else None

    def forward(self, x: torch.Tensor, recomputed: RecomputedInput | None = None, output: bool = True) -> torch.Tensor:
        """`output` False: only the graph is needed, and the sum over tp is left out."""
        return self.sum(self.part(x, recomputed), output)

    def part(self, x: torch.Tensor, recomputed: RecomputedInput | None = None) -> torch.Tensor:
        """This rank's summand, [T, out]."""
        c = self.context
        added = self.bias if c.tp.is_first else None
        return _linear(x, (_Affine(self.weight, added),), None, recomputed, c.products)[0]

    def sum(self, part: torch.Tensor, output: bool = True) -> torch.Tensor:
        handles = () if self.bias is None else (self.bias.handle,)
        return SumParts.apply(part, self.bias, self.context.stream, output, *handles)
