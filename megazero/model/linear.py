"""Linear layers, sharded over tp.

Activations are [T, h], the T = b s tokens of a micro-batch one below the other. The residual stream holds all of them
on every tensor-parallel rank, or with sequence parallelism 1/tp of them: see `ResidualStream`.

Weights never collect a `.grad`. Every Function that uses one hands its gradient to `Weight.accumulate_grad(write)`,
which calls `write(out, add)` with `out` the weight's window of a flat gradient buffer: to be written (add False: the
first contribution) or added to. A bias' gradient is summed in fp32 or wider, and rounded to the buffer's type alone.

Shapes: b micro-batch, s sequence, T tokens, T' those of the residual stream on this rank, h hidden; /tp = this rank's
part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn as nn

from megazero.comm.collectives import Pending
from megazero.model.context import AsyncTensor, Context, RecomputedInput
from megazero.model.fused_ops import wide
from megazero.model.matmul import as_matrix, write_or_add
from megazero.model.weight import GradWriter


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
        sharded, summed = {} if tp_dim is None else {tp_dim: "tp"}, () if rows is None else ("tp",)
        self.weight = context.weight(*out, inner, sharded=sharded, std=std, decays=True, summed=summed)
        self.bias = context.weight(*out, sharded=sharded, summed=summed) if bias else None

    def forward(self, x: torch.Tensor, recomputed: RecomputedInput | None = None) -> torch.Tensor:
        return column_linears((self,), x, recomputed)[0]

    @property
    def matrix(self) -> torch.Tensor:
        """The weight that this rank computes with, [out/tp, in]."""
        return as_matrix(self.weight.data if self.rows is None else self.weight.data[self.rows])

    def output(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] -> [T, out/tp], without a graph."""
        bias = None if self.bias is None else self.bias.data
        if bias is not None:
            bias = (bias if self.rows is None else bias[self.rows]).flatten()
        return self.context.products.output(x, self.matrix, bias)

    def add_gradients(self, x: torch.Tensor, dy: torch.Tensor) -> None:
        """x [T, in], dy [T, out/tp]"""
        weight_grad = self.context.products.weight_grad
        self.weight.accumulate_grad(GradWriter(_to_rows(weight_grad, self.rows), (x, dy)))
        if self.bias is not None:
            self.bias.accumulate_grad(GradWriter(_to_rows(write_or_add, self.rows), (dy.sum(0, dtype=wide(dy)),)))


def _to_rows(write: Callable[..., None], rows: slice | None) -> Callable[..., None]:
    """`write` for the rows that are computed with; the gradient of the others is zero."""
    if rows is None:
        return write

    def write_rows(*args: Any) -> None:
        *tensors, out, add = args
        if not add:
            out.zero_()
        write(*tensors, out[rows], add)

    return write_rows


class RowLinear(nn.Module):
    """y [T', out] = sum over tp of x [T, in/tp] @ weight[out, in/tp].T, + bias[out], which the first rank adds."""

    def __init__(self, context: Context, inner: int, out: int, *, std: float, bias: bool) -> None:
        super().__init__()
        self.context = context
        self.weight = context.weight(out, inner, sharded={1: "tp"}, std=std, decays=True)
        self.bias = context.weight(out) if bias else None

    def forward(self, x: torch.Tensor, recomputed: RecomputedInput | None = None, output: bool = True) -> torch.Tensor:
        return row_linears((self,), (x,), (recomputed,), output)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's summand, [T, out], without a graph."""
        bias = self.bias.data if self.bias is not None and self.context.tp.is_first else None
        return self.context.products.output(x, self.weight.data, bias)


def column_linears(
    layers: Sequence[ColumnLinear], x: torch.Tensor, recomputed: RecomputedInput | None = None
) -> tuple[torch.Tensor, ...]:
    """Apply several column-linear layers to one input [T', in], which is gathered, and its gradient summed, once."""
    return _ColumnLinears.apply(x, layers, recomputed, *_handles(layers))


def row_linears(
    layers: Sequence[RowLinear],
    xs: Sequence[torch.Tensor],
    recomputed: Sequence[RecomputedInput | None],
    output: bool = True,
) -> torch.Tensor:
    """Add the outputs of several row-linear layers, an input each; they are summed over tp once.

    `output` False: only the graph is needed. What is returned has the right shape, and no values.
    """
    return _RowLinears.apply(layers, recomputed, output, *xs, *_handles(layers))


def _handles(layers: Sequence[ColumnLinear] | Sequence[RowLinear]) -> list[torch.Tensor]:
    return [weight.handle for layer in layers for weight in (layer.weight, layer.bias) if weight is not None]


class _ColumnLinears(torch.autograd.Function):
    """See `column_linears`, and Note [the Weight itself].

    Of a sharded stream this rank's tokens alone are kept, and gathered again in backward. Nothing waits: the tokens
    arrive while the input gradient is computed, and that is summed while the weight gradients are.
    """

    @staticmethod
    def forward(ctx, x, layers, recomputed, *handles):
        ctx.save_for_backward(x if recomputed is None else recomputed.source)
        ctx.layers, ctx.prepare, ctx.num_handles = layers, recomputed and recomputed.prepare, len(handles)
        whole = layers[0].context.stream.start_unshard(x).wait()
        return tuple(layer.output(whole) for layer in layers)

    @staticmethod
    def backward(ctx, *dys):
        (x,) = ctx.saved_tensors
        c = ctx.layers[0].context
        trains = any(layer.weight.trains for layer in ctx.layers)
        if ctx.prepare is not None and trains:
            x = ctx.prepare(x)
        unsharding = c.stream.start_unshard(x) if trains else AsyncTensor(x, Pending())
        reducing = None
        if ctx.needs_input_grad[0]:
            dx = None
            for layer, dy in zip(ctx.layers, dys, strict=True):
                part = c.products.input_grad(dy, layer.matrix)
                dx = part if dx is None else dx.add_(part)
            reducing = c.stream.start_reduce(dx)
        whole = unsharding.wait()
        for layer, dy in zip(ctx.layers, dys, strict=True):
            layer.add_gradients(whole, dy)
        return reducing and reducing.wait(), *[None] * (2 + ctx.num_handles)


class _RowLinears(torch.autograd.Function):
    """See `row_linears`, and Note [the Weight itself]. A bias' gradient is of this rank's tokens."""

    @staticmethod
    def forward(ctx, layers, recomputed, output, *xs_and_handles):
        xs = xs_and_handles[: len(layers)]
        ctx.save_for_backward(*(x if r is None else r.source for x, r in zip(xs, recomputed, strict=True)))
        ctx.layers, ctx.prepares = layers, [r and r.prepare for r in recomputed]
        ctx.num_handles = len(xs_and_handles) - len(layers)
        stream = layers[0].context.stream
        if not output:
            return xs[0].new_empty(stream.num_tokens(len(xs[0])), layers[0].weight.spec.shape[0])
        total = None
        for layer, x in zip(layers, xs, strict=True):
            part = layer.part(x)
            total = part if total is None else total.add_(part)
        return stream.start_reduce(total).wait()

    @staticmethod
    def backward(ctx, dy):
        c = ctx.layers[0].context
        unsharding = c.stream.start_unshard(dy)
        for layer in ctx.layers:
            if layer.bias is not None:
                layer.bias.add_grad(dy.sum(0, dtype=wide(dy)))
        dy, dxs = unsharding.wait(), []
        needs = ctx.needs_input_grad[3:]
        for layer, prepare, x, needed in zip(ctx.layers, ctx.prepares, ctx.saved_tensors, needs, strict=False):
            if prepare is not None and layer.weight.trains:
                x = prepare(x)
            dxs.append(c.products.input_grad(dy, layer.weight.data) if needed else None)
            layer.weight.accumulate_grad(GradWriter(c.products.weight_grad, (x, dy)))
        return None, None, None, *dxs, *[None] * ctx.num_handles
