"""Linear layers, sharded over tp, joined with a norm, an activation and the residual into few autograd Functions.

Weights have no `.grad`. Functions hand gradients to `Weight.accumulate_grad(write)`, which calls `write(out, add)`:
`out` is the weight's window of a flat gradient buffer; `add` is False for the first contribution. A bias' gradient is
summed in fp32 or wider, and rounded only to the buffer's type.

Note [few Functions]: a Function in Python costs the host 7 us, and at small micro-batches an H100 waits for its host.
So everything between two points that need autograd is one Function. `NormedColumns` and `ResidualRows` are pairs of
forward and backward below autograd, which the Functions at the end of this file call.

Shapes: b micro-batch, s sequence, T = b s tokens, T' those of the residual stream on this rank, h hidden; /tp = this
rank's part.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from megazero.engine.kernels.dropout import Dropout, Rows
from megazero.engine.kernels.eager import Tensors, wide
from megazero.engine.kernels.kernel_table import Activation
from megazero.engine.kernels.matmul import as_matrix, write_or_add
from megazero.engine.model.layers.context import Context
from megazero.engine.model.layers.norm import Norm
from megazero.engine.model.layers.weight import GradWriter, HasWeights, WeightedModule, handle_of


class ColumnLinear(WeightedModule):
    """y [T, out/tp] = x [T, in] @ weight[out/tp, in].T + bias[out/tp]

    Args:
        out: the weight's shape without its last dim, such as (heads, 3, d).
        tp_dim: the one of these dims that is sharded; None: replicated.
        rows: of dim 0 of a replicated weight, with which this rank computes; None: all.
        matrices: the dims that number matrices of their own: of queries, keys and values, or of gate and value.
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
        matrices: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.context, self.rows = context, rows
        sharded, summed = {} if tp_dim is None else {tp_dim: "tp"}, () if rows is None else ("tp",)
        self.weight = context.weight(
            *out, inner, sharded=sharded, std=std, decays=True, summed=summed, matrices=matrices
        )
        self.bias = context.weight(*out, sharded=sharded, summed=summed) if bias else None

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

    def add_gradients(self, x: torch.Tensor, dy: torch.Tensor, summed: torch.Tensor | None = None) -> None:
        """x [T, in], dy [T, out/tp]; `summed`: the sum of dy over tokens, if it is known."""
        weight_grad = self.context.products.weight_grad
        self.weight.accumulate_grad(GradWriter(_to_rows(weight_grad, self.rows), (x, dy)))
        if self.bias is not None:
            summed = dy.sum(0, dtype=wide(dy)) if summed is None else summed
            self.bias.accumulate_grad(GradWriter(_to_rows(write_or_add, self.rows), (summed,)))


def _to_rows(write: Callable[..., None], rows: slice | None) -> Callable[..., None]:
    """Restrict `write` to `rows`; the gradient of the other rows is 0."""
    if rows is None:
        return write

    def write_rows(*args: Any) -> None:
        *tensors, out, add = args
        if not add:
            out.zero_()
        write(*tensors, out[rows], add)

    return write_rows


class RowLinear(WeightedModule):
    """y [T', out] = sum over tp of x [T, in/tp] @ weight[out, in/tp].T, plus bias[out], which the first rank adds."""

    def __init__(self, context: Context, inner: int, out: int, *, std: float, bias: bool) -> None:
        super().__init__()
        self.context = context
        self.weight = context.weight(out, inner, sharded={1: "tp"}, std=std, decays=True, matrices=())
        self.bias = context.weight(out) if bias else None

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's summand, [T, out], without a graph."""
        bias = self.bias.data if self.bias is not None and self.context.tp.is_first else None
        return self.context.products.output(x, self.weight.data, bias)


# gradients of column-linear layers' outputs, each with its sum over tokens, if it is known
Grads = Sequence[tuple[torch.Tensor, torch.Tensor | None]]


class NormedColumns(NamedTuple):
    """Column-linear layers with the same input norm(x) [T', in]. It is gathered once, and its gradient summed once.

    If the stream is sharded, only this rank's tokens are saved. Backward gathers them again while the input gradient is
    computed, and sums that while the weight gradients are computed.
    """

    norm: Norm
    layers: tuple[ColumnLinear, ...]

    def forward(self, x: torch.Tensor) -> tuple[Tensors, Tensors]:
        """x [T', in] -> outputs [T, out/tp], and the tensors to save for `backward`."""
        y, *numbers = self.norm.normalise(x)
        context = self.layers[0].context
        whole = context.stream.start_unshard(y).wait()
        kept = (x, *numbers) if context.selective else (x, *numbers, y)
        return tuple([layer.output(whole) for layer in self.layers]), kept

    def backward(
        self, dys: Grads, residual: torch.Tensor | None, wanted: bool, x: torch.Tensor, *kept: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the gradient of x plus `residual`, another gradient of x; None unless it is wanted."""
        norm, layers, context = self.norm, self.layers, self.layers[0].context
        unsharding = reducing = None
        if any(layer.weight.trains for layer in layers):
            y = norm.normalise(x)[0] if context.selective else kept[-1]
            unsharding = context.stream.start_unshard(y)
        if wanted or any(weight.trains for weight in norm.weights):
            dy = None
            for layer, (upper, _) in zip(layers, dys, strict=True):
                part = context.products.input_grad(upper, layer.matrix)
                dy = part if dy is None else dy.add_(part)
            reducing = context.stream.start_reduce(dy)
        whole = x if unsharding is None else unsharding.wait()
        for layer, upper in zip(layers, dys, strict=True):
            layer.add_gradients(whole, *upper)
        if reducing is None:
            return None
        return norm.input_grad(reducing.wait(), residual, x, *(kept if context.selective else kept[:-1]))


class Residual(NamedTuple):
    """The sum of a branch's result y with the residual: residual + dropout(multiplier * norm(y))."""

    dropout: Dropout
    norm: Norm | None = None  # None: y itself
    multiplier: float = 1.0

    def join(
        self, residual: torch.Tensor, y: torch.Tensor, mask: tuple[Rows, ...] | None
    ) -> tuple[torch.Tensor, Tensors]:
        """residual, y [T', h] -> their sum, and the tensors that `branch_grad` needs. May overwrite y."""
        kept: Tensors = ()
        if self.norm is not None:
            normed, *statistics = self.norm.normalise(y)
            y, kept = normed, (y, *statistics)
        if self.multiplier != 1.0:
            y.mul_(self.multiplier)
        return self.dropout.onto(residual, y, mask), kept

    def branch_grad(self, dy: torch.Tensor, mask: tuple[Rows, ...] | None, kept: Tensors) -> torch.Tensor:
        """The gradient of the sum [T', h], which is also the residual's -> that of y."""
        dy = self.dropout.grad(dy, mask)
        if self.multiplier != 1.0:
            dy = dy * self.multiplier
        return dy if self.norm is None else self.norm.input_grad(dy, None, *kept)


class ResidualRows(NamedTuple):
    """residual + sum over layers of layer(activation(its input)), summed over tp once and joined by `residual`."""

    layers: tuple[RowLinear, ...]
    activations: tuple[Activation | None, ...]  # per layer; None: the input itself
    residual: Residual
    mask: tuple[Rows, ...] | None  # rows of the dropout's mask; None: no dropout

    @property
    def parts(self) -> tuple[HasWeights | None, ...]:
        return *self.layers, self.residual.norm

    def forward(self, xs: Tensors, residual: torch.Tensor, output: bool) -> tuple[torch.Tensor, Tensors]:
        """xs [T, in/tp], residual [T', out] -> [T', out], and the tensors to save for `backward`.

        Without `output`, callers use only the graph and the result's shape, so its values are not computed.
        """
        context, total, kept = self.layers[0].context, None, []
        for layer, activation, x in zip(self.layers, self.activations, xs, strict=True):
            inner = x if activation is None else activation.forward(x)
            kept += [x, inner] if self._keeps_inner(activation) else [x]
            if output or self.residual.norm is not None:  # backward needs the norm's input
                part = layer.part(inner)
                total = part if total is None else total.add_(part)
        if total is None:
            return torch.empty_like(residual), tuple(kept)
        y, joined = self.residual.join(residual, context.stream.start_reduce(total).wait(), self.mask)
        return y, (*kept, *joined)

    def backward(
        self, dy: torch.Tensor, wanted: tuple[bool, ...], kept: Tensors
    ) -> list[tuple[torch.Tensor | None, torch.Tensor | None]]:
        """dy [T', out] -> the wanted gradients of the inputs, each with its sum over tokens if the activation gives it.

        The residual's gradient is dy. A bias' gradient is a sum over this rank's T' tokens.
        """
        context, dxs, saved = self.layers[0].context, [], iter(kept)
        inputs = [(next(saved), next(saved) if self._keeps_inner(each) else None) for each in self.activations]
        dy = self.residual.branch_grad(dy, self.mask, tuple(saved))
        unsharding = context.stream.start_unshard(dy)
        for layer in self.layers:
            if layer.bias is not None:
                layer.bias.add_grad(dy.sum(0, dtype=wide(dy)))
        dy = unsharding.wait()
        for layer, activation, (x, inner), needed in zip(self.layers, self.activations, inputs, wanted, strict=True):
            if inner is None:
                inner = x if activation is None or not layer.weight.trains else activation.forward(x)
            dx = context.products.input_grad(dy, layer.weight.data) if needed else None
            layer.weight.accumulate_grad(GradWriter(context.products.weight_grad, (inner, dy)))
            dxs.append((dx, None) if activation is None or dx is None else activation.grad(dx, x))
        return dxs

    def _keeps_inner(self, activation: Activation | None) -> bool:
        return activation is not None and not self.layers[0].context.selective


class Split:
    """Splits and rearranges the outputs of column-linear layers, below autograd. This one leaves them as they are."""

    norms: tuple[Norm, ...] = ()  # that it applies

    def forward(self, *ys: torch.Tensor) -> tuple[Tensors, Tensors]:
        """Return the parts, and the tensors to save for `backward`."""
        return ys, ()

    def backward(self, grads: Sequence[torch.Tensor], kept: Tensors) -> Tensors:
        """Return the gradients of the outputs."""
        return tuple(grads)


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, columns, split, handle):
        outputs, kept = columns.forward(x)
        parts, more = split.forward(*outputs)
        ctx.save_for_backward(*kept, *more)
        ctx.columns, ctx.split, ctx.num_kept = columns, split, len(kept)
        return *parts, x

    @staticmethod
    def backward(ctx, *grads):
        *parts, residual = grads
        kept = ctx.saved_tensors
        dys = [(dy, None) for dy in ctx.split.backward(parts, kept[ctx.num_kept :])]
        return ctx.columns.backward(dys, residual, ctx.needs_input_grad[0], *kept[: ctx.num_kept]), None, None, None


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, output, handle, residual, *xs):
        y, kept = rows.forward(xs, residual, output)
        ctx.save_for_backward(*kept)
        ctx.rows = rows
        return y

    @staticmethod
    def backward(ctx, dy):
        dxs = ctx.rows.backward(dy, ctx.needs_input_grad[4:], ctx.saved_tensors)
        return None, None, None, dy, *[dx for dx, _ in dxs]


class _ColumnsAndRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, columns, rows, output, handle):
        inner, kept = columns.forward(x)
        y, more = rows.forward(inner, x, output)
        ctx.save_for_backward(*kept, *more)
        ctx.columns, ctx.rows, ctx.num_kept = columns, rows, len(kept)
        return y

    @staticmethod
    def backward(ctx, dy):
        kept, columns, wanted = ctx.saved_tensors, ctx.columns, ctx.needs_input_grad[0]
        below = wanted or any(weight.trains for part in (columns.norm, *columns.layers) for weight in part.weights)
        dys = ctx.rows.backward(dy, (below,), kept[ctx.num_kept :])
        dx = columns.backward(dys, dy, wanted, *kept[: ctx.num_kept]) if below else None
        return dx, None, None, None, None


def normed_columns(x: torch.Tensor, norm: Norm, layers: tuple[ColumnLinear, ...], split: Split) -> Tensors:
    """x [T', in] -> the outputs of `layers` for norm(x), [T, out/tp], split by `split`; and x, for the residual's sum.

    The returned x carries the residual's gradient to the norm's backward, which adds the two in one pass.
    """
    return _Columns.apply(x, NormedColumns(norm, layers), split, handle_of(norm, *layers, *split.norms))


def rows_onto(residual: torch.Tensor, xs: Tensors, rows: ResidualRows, output: bool = True) -> torch.Tensor:
    """residual [T', out], xs [T, in/tp] -> `rows`' sum, [T', out]; see `ResidualRows.forward`."""
    return _Rows.apply(rows, output, handle_of(*rows.parts), residual, *xs)


def columns_and_rows(x: torch.Tensor, columns: NormedColumns, rows: ResidualRows, output: bool) -> torch.Tensor:
    """x [T', h] -> x + rows(activation(columns(norm(x)))), in one Function."""
    return _ColumnsAndRows.apply(x, columns, rows, output, handle_of(columns.norm, *columns.layers, *rows.parts))
