"""The one `linear`, the layers that shard it over tp, the token table and the vocabulary's loss.

Activations are [T, h], the T = b s tokens of a micro-batch one below the other. The residual stream holds all of them
on every tensor-parallel rank, or with sequence parallelism 1/tp of them: see `ResidualStream`.

Parameters never collect a `.grad`. Every Function that uses one hands its gradient to
`accumulate_grad(parameter, write)`, which calls `write(out, add)` with `out` the parameter's window of a flat gradient
buffer: to be written (add False: the first
contribution) or added to.

Shapes: b micro-batch, s sequence, T tokens, T' those of the residual stream on this rank, h hidden, v vocabulary;
/tp = this rank's part.

Note [the Parameter itself]: a Function that needs a weight in backward keeps the Parameter as a plain attribute, never
a view or a cast of it, and never through save_for_backward. A released weight is gathered into another slot, so
backward must ask the Parameter where it is now.
"""

from __future__ import annotations

import torch
import torch.nn as nn

from megazero.comm.collectives import Pending
from megazero.model.context import AsyncTensor, Context, GradWriter, RecomputedInput, write_sum
from megazero.model.matmul import Products, as_matrix
from megazero.plan.parameters import ParamSpec


class _Linear(torch.autograd.Function):
    """See Note [the Parameter itself]. `stream`: where the input is the residual stream, else None.

    Of a sharded stream only this rank's tokens are saved; backward unshards them again. Nothing waits: tokens arrive
    while the input gradient is computed, and that is summed while the weight gradient is.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, adds_bias, stream, accumulate_grad, recomputed, products: Products):
        ctx.save_for_backward(x if recomputed is None else recomputed.source)
        ctx.prepare, ctx.products = recomputed and recomputed.prepare, products
        ctx.weight, ctx.bias, ctx.adds_bias, ctx.stream, ctx.accumulate_grad = (
            weight,
            bias,
            adds_bias,
            stream,
            accumulate_grad,
        )
        added = bias.detach().flatten() if adds_bias else None
        whole = x if stream is None else stream.start_unshard(x).wait()
        return products.output(whole, as_matrix(weight.detach()), added)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        gathers = ctx.stream is not None and ctx.weight.requires_grad
        if ctx.prepare is not None and ctx.weight.requires_grad:
            x = ctx.prepare(x)
        unsharding = ctx.stream.start_unshard(x) if gathers else AsyncTensor(x, Pending())
        reducing = None
        if ctx.needs_input_grad[0]:
            dx = ctx.products.input_grad(dy, as_matrix(ctx.weight.detach()))
            reducing = ctx.stream.start_reduce(dx) if ctx.stream is not None else AsyncTensor(dx, Pending())
        whole = unsharding.wait()
        ctx.accumulate_grad(ctx.weight, GradWriter(ctx.products.weight_grad, (whole, dy)))  # not called if frozen
        if ctx.stream is not None:
            ctx.accumulate_grad(ctx.bias, write_sum(dy.sum(0)))
        return reducing and reducing.wait(), None, None, None, None, None, None, None


class SumParts(torch.autograd.Function):
    """Sum the partial products over tp. The partial product is new and not referenced elsewhere.

    The bias, if there is one, is in the parts already; its gradient is of this rank's tokens.
    """

    @staticmethod
    def forward(ctx, part, bias, stream, accumulate_grad, output):
        ctx.bias, ctx.stream, ctx.accumulate_grad = bias, stream, accumulate_grad
        if not output:  # a recompute: it is never read
            return part.view(-1, part.shape[-1])[: len(stream.tokens(part.numel() // part.shape[-1]))]
        return stream.start_reduce(part).wait().view(-1, part.shape[-1])

    @staticmethod
    def backward(ctx, dy):
        unsharding = ctx.stream.start_unshard(dy)
        if ctx.bias is not None:
            ctx.accumulate_grad(ctx.bias, write_sum(dy.sum(0)))
        return unsharding.wait(), None, None, None, None


class ColumnLinear(nn.Module):
    """y [T, out/tp] = x [T', in] of all tokens @ weight[out/tp, in].T + bias[out/tp]"""

    def __init__(self, weight: ParamSpec, bias: ParamSpec, context: Context) -> None:
        super().__init__()
        self.context = context
        self.weight, self.bias = context.parameter(weight), context.parameter(bias)

    def forward(self, x: torch.Tensor, recomputed: RecomputedInput | None = None) -> torch.Tensor:
        c = self.context
        return _Linear.apply(x, self.weight, self.bias, True, c.stream, c.accumulate_grad, recomputed, c.products)


class RowLinear(nn.Module):
    """y [T', out] = sum over tp of x [T, in/tp] @ weight[out, in/tp].T, + bias[out], which the first rank adds."""

    def __init__(self, weight: ParamSpec, bias: ParamSpec, context: Context) -> None:
        super().__init__()
        self.context = context
        self.weight, self.bias = context.parameter(weight), context.parameter(bias)

    def forward(self, x: torch.Tensor, recomputed: RecomputedInput | None = None, output: bool = True) -> torch.Tensor:
        """`output` False: only the graph is needed, and the sum over tp is left out."""
        c = self.context
        part = _Linear.apply(x, self.weight, self.bias, c.tp.is_first, None, c.accumulate_grad, recomputed, c.products)
        return SumParts.apply(part, self.bias, c.stream, c.accumulate_grad, output)
