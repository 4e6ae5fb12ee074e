"""A mixture of experts in place of a block's MLP: x + sum over a token's experts of weight * expert(norm(x)).

Tokens are sorted by expert, and the products of all experts are one grouped product. A result's weight is applied
before the expert's second product: that product is linear, and so the weight's gradient needs no result of an expert.
Inner widths are sharded over tp, as an MLP's.

Shapes: T tokens, T' those of the residual stream on this rank, h hidden, E experts, k experts of a token, R rows,
f width inside an expert; /tp = this rank's part.
"""

import functools
import math
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from megazero.engine.kernels.eager import Tensors, wide
from megazero.engine.kernels.grouped import GroupedProducts, RowGroups
from megazero.engine.kernels.kernel_table import GATED
from megazero.engine.model.dispatch import Choices, Dispatch, SortedRows, arranged, as_arrived
from megazero.engine.model.experts.router import Routed, Router
from megazero.engine.model.layers.context import Context, MicroBatchInfo
from megazero.engine.model.layers.linear import Residual
from megazero.engine.model.layers.norm import Norm
from megazero.engine.model.layers.weight import GradWriter, WeightedModule, handle_of
from megazero.engine.options.model_options import ModelOptions


class GroupedLinear(WeightedModule):
    """E linear layers, or one: y [R, out] = x [R, in] @ weight[.., out, in].T with the matrix of each row's group.

    A bias is sharded with its weight. If the weight's inner dim is sharded, y is a summand of each rank of etp, and a
    rank adds its part of the bias to its part of the columns. So no rank adds the same, and no gradient needs a sum.

    Args:
        shape: of the weight; all but the last dim are out, except a first dim of `experts`.
        experts: 0: one layer, without that dim.
        top: experts of a token.
        bias: of experts: each has one.
    """

    def __init__(
        self, context: Context, *shape: int, experts: int, top: int, sharded: int, std: float, bias: bool
    ) -> None:
        super().__init__()
        self.context, self.count = context, experts // context.ep.size or 1
        self.products = GroupedProducts(context.products)
        dims = (experts, *shape) if experts else shape
        self.weight = context.weight(
            *dims,
            sharded={0: "ep", sharded + 1: "etp"} if experts else {sharded: "tp"},
            std=std,
            decays=True,
            per_token=(top, experts) if experts else (1, 1),
            matrices=tuple(range(len(dims) - 2)),
        )
        self.bias = None
        if bias and experts:
            dims = {0: "ep", min(sharded, len(shape) - 2) + 1: "etp"}
            self.bias = context.weight(experts, *shape[:-1], sharded=dims, per_token=(top, experts))

    @property
    def matrices(self) -> torch.Tensor:
        """[E, out, in]"""
        data = self.weight.data
        return data.view(self.count, -1, data.shape[-1])

    def output(self, x: torch.Tensor, groups: RowGroups, scales: torch.Tensor | None = None) -> torch.Tensor:
        """`scales`: factors of the rows' biases, [R]; None: 1."""
        y = self.products.output(x, self.matrices, groups)
        if self.bias is not None:
            self._biased(y).add_(_scaled(self._biases(groups, len(y)), scales))
        return y

    def backward(
        self, dy: torch.Tensor, x: torch.Tensor, groups: RowGroups, scales: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Hand over the gradients. Return that of scales, this rank's summand, of a bias with scales."""
        write = functools.partial(self.products.weight_grad, groups)
        self.weight.accumulate_grad(GradWriter(write, (x, dy)))
        if self.bias is None:
            return None
        own, numbers = self._biased(dy), groups.numbers(len(dy))[:, None]
        factors = torch.ones_like(own[:, :1]) if scales is None else scales.to(dy.dtype)[:, None]
        indicator = dy.new_zeros(len(dy), self.count).scatter_(1, numbers, factors)
        self.bias.accumulate_grad(GradWriter(self._write_bias, (own, indicator)))
        return None if scales is None else (own.to(scales.dtype) * self._biases(groups, len(dy))).sum(-1)

    def _biases(self, groups: RowGroups, rows: int) -> torch.Tensor:
        """Return the bias of each row's expert, this rank's columns of it."""
        assert self.bias is not None
        return self.bias.data.view(self.count, -1).index_select(0, groups.numbers(rows))

    def _biased(self, y: torch.Tensor) -> torch.Tensor:
        """y [R, out] or [R, out/etp] -> a view of the columns to which this rank adds biases"""
        assert self.bias is not None
        width, rank = math.prod(self.bias.block.shape[1:]), self.context.etp.rank
        return y if y.shape[1] == width else y[:, rank * width : (rank + 1) * width]

    def _write_bias(self, dy: torch.Tensor, indicator: torch.Tensor, out: torch.Tensor, add: bool) -> None:
        """Sum dy [R, c] by expert: a product with the indicator [R, E] of rows, in the same order every time."""
        self.products.products.weight_grad(dy, indicator, out.view(self.count, -1), add)

    def input_grad(self, dy: torch.Tensor, groups: RowGroups) -> torch.Tensor:
        return self.products.input_grad(dy, self.matrices, groups)


class ExpertMLPs(nn.Module):
    """E MLPs of one width, or one: weight * down(activation(up(x))), with a weight per row. Below autograd."""

    def __init__(self, model: ModelOptions, context: Context, width: int, experts: int = 0) -> None:
        super().__init__()
        h, name = model.hidden_size, model.activation
        out, dim = ((2, width), 1) if name in GATED else ((width,), 0)
        options = {"experts": experts, "top": model.moe_router_topk, "bias": "experts" in model.linear_biases}
        self.up = GroupedLinear(context, *out, h, sharded=dim, std=model.init_method_std, **options)
        self.down = GroupedLinear(context, h, width, sharded=1, std=model.residual_std, **options)
        self.weights = (self.up.weight, self.down.weight)
        self.activation, self.selective = context.kernels.activations[name], context.selective

    def forward(
        self, x: torch.Tensor, weights: torch.Tensor | None, groups: RowGroups, output: bool
    ) -> tuple[torch.Tensor | None, Tensors]:
        """x [R, h], weights [R], None: 1 -> this rank's summand [R, h], None unless `output`; and tensors to save."""
        up = self.up.output(x, groups)
        inner = self.activation.forward(up)
        kept = (up,) if self.selective else (up, inner)
        return (self.down.output(_scaled(inner, weights), groups, weights) if output else None), kept

    def backward(
        self, dy: torch.Tensor, x: torch.Tensor, weights: torch.Tensor | None, groups: RowGroups, kept: Tensors
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """dy [R, h] -> gradients of x and, this rank's summand, of the weights."""
        up = kept[0]
        inner = self.activation.forward(up) if self.selective else kept[1]
        dinner, dweights = self.down.input_grad(dy, groups), None
        of_bias = self.down.backward(dy, _scaled(inner, weights), groups, weights)
        if weights is not None:
            dweights = (dinner.to(weights.dtype) * inner).sum(-1)
            if of_bias is not None:
                dweights += of_bias
            dinner = _scaled(dinner, weights)
        dup, _ = self.activation.grad(dinner, up)
        self.up.backward(dup, x, groups)
        return self.up.input_grad(dup, groups), dweights


def _scaled(x: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """x [R, f], weights [R] in a type as wide or wider -> their product in x's type"""
    return x if weights is None else (x * weights[:, None]).to(x.dtype)


class Gate(WeightedModule):
    """sigmoid(x @ weight.T), the factor of the shared expert, in fp32 or wider. Below autograd."""

    def __init__(self, model: ModelOptions, context: Context) -> None:
        super().__init__()
        self.weight = context.weight(1, model.hidden_size, std=model.init_method_std, decays=True, summed=("tp",))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, h] -> [T]"""
        exact = wide(x)
        return F.linear(x.to(exact), self.weight.data.to(exact)).flatten().sigmoid_()

    def backward(self, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """dy [T], this rank's summand -> that of the gradient of x [T, h]."""
        y, exact = self(x), dy.dtype
        dy = dy * y * (1 - y)
        self.weight.add_grad((dy @ x.to(exact))[None])
        return torch.outer(dy, self.weight.data[0].to(exact)).to(x.dtype)


class Experts(nn.Module):
    """The experts of a block, their router and, if there is one, the expert that all tokens pass.

    The experts' tokens are gathered over etp, those of the shared expert over tp, like an MLP's. These are the same
    tokens, and sums over the same ranks, if experts are divided over tp: `together`.
    """

    def __init__(self, model: ModelOptions, number: int, context: Context) -> None:
        super().__init__()
        self.context = context
        self.router = Router(model, number, context)
        self.experts = ExpertMLPs(model, context, model.expert_size, model.num_experts)
        shared = model.moe_shared_expert_intermediate_size
        self.shared = ExpertMLPs(model, context, shared) if shared else None
        self.shared_gate = Gate(model, context) if shared and model.moe_shared_expert_gate else None
        self.stream, self.shared_stream = context.expert_stream, context.stream
        self.together = context.etp.size == context.tp.size

    def forward(
        self, x: torch.Tensor, norm: Norm, residual: Residual, tokens: MicroBatchInfo, output: bool
    ) -> torch.Tensor:
        """x [T', h] -> x + experts(norm(x)) [T', h]; `residual` joins them."""
        handle = handle_of(norm, self.router, self.experts, self.shared, self.shared_gate, residual.norm)
        return _Experts.apply(x, _Branch(self, norm, residual, tokens), (output, torch.is_grad_enabled()), handle)


class _Branch(NamedTuple):
    """Forward and backward of a micro-batch, below autograd."""

    layer: Experts
    norm: Norm
    residual: Residual
    tokens: MicroBatchInfo

    def forward(self, x: torch.Tensor, output: bool, has_graph: bool) -> tuple[torch.Tensor, list[Tensors], Dispatch]:
        """x [T', h] -> [T', h], tensors to save by part, and the exchange of rows"""
        layer, stream = self.layer, self.layer.stream
        output = output or self.residual.norm is not None  # backward needs that norm's input
        y, *numbers = self.norm.normalise(x)
        whole = stream.start_unshard(y).wait()
        routed = layer.router(whole, self.tokens, has_graph)
        choices = routed.choices
        by_expert, dispatch = SortedRows.of(choices.ids, choices.dispatch), choices.dispatch
        order = dispatch.order()
        arriving = dispatch.start(by_expert.rows(whole)), dispatch.start(by_expert.choices(routed.weights))
        total, kept_shared = None, Tensors()
        if layer.shared is not None:  # while rows are exchanged
            tokens = whole if layer.together else layer.shared_stream.start_unshard(y).wait()
            gate = None if layer.shared_gate is None else layer.shared_gate(tokens)
            total, kept_shared = layer.shared(tokens, gate, RowGroups.one(tokens), output)
            if total is not None and not layer.together:
                total = layer.shared_stream.start_reduce(total).wait()
        rows, weights = (arranged(each.wait(), order) for each in arriving)
        part, kept = layer.experts(rows, weights, dispatch.groups, output)
        result, joined = torch.empty_like(x), Tensors()
        if part is not None:
            part = by_expert.unsorted(dispatch.start_back(as_arrived(part, order)).wait()).sum(1)
            if total is not None and layer.together:
                part += total
            part = stream.start_reduce(part).wait()
            if total is not None and not layer.together:
                part += total
            result, joined = self.residual.join(x, part, self.tokens.dropout_rows)
        saved = [
            (x, *numbers) if layer.context.selective else (x, *numbers, y),
            (routed.logits, choices.ids, *(() if choices.counts is None else (choices.counts,))),
            kept,
            () if order is None else (order, rows, weights),
            kept_shared,
            joined,
        ]
        return result, saved, dispatch

    def backward(self, dy: torch.Tensor, wanted: bool, saved: list[Tensors], dispatch: Dispatch) -> torch.Tensor | None:
        """dy [T', h] -> the gradient of x, if it is wanted"""
        layer, stream = self.layer, self.layer.stream
        normed, (logits, ids, *counts), kept, arrived, kept_shared, joined = saved
        x, *numbers = normed if layer.context.selective else normed[:-1]
        y = self.norm.normalise(x)[0] if layer.context.selective else normed[-1]
        unsharding = stream.start_unshard(y)
        upper = self.residual.branch_grad(dy, self.tokens.dropout_rows, joined)
        uppers = stream.start_unshard(upper).wait()
        whole = unsharding.wait()
        choices = Choices(ids, counts[0] if counts else None, dispatch)
        routed = Routed(logits, choices, layer.router.mixed(logits, choices))
        by_expert = SortedRows.of(ids, dispatch)
        order, rows, weights = arrived or (None, by_expert.rows(whole), by_expert.choices(routed.weights))
        arriving = dispatch.start(by_expert.rows(uppers))
        total = None
        if layer.shared is not None:
            total = self._shared_backward(y, upper, whole, uppers=uppers, kept=kept_shared)
        darrived = arranged(arriving.wait(), order)
        drows, dweights = layer.experts.backward(darrived, rows, weights, groups=dispatch.groups, kept=kept)
        assert dweights is not None
        back = [dispatch.start_back(as_arrived(each, order)) for each in (drows, dweights)]
        part = by_expert.unsorted(back[0].wait()).sum(1)
        part += layer.router.backward(by_expert.unsorted(back[1].wait()), whole, routed, self.tokens)
        if total is not None and layer.together:
            part += total
        part = stream.start_reduce(part).wait()
        if total is not None and not layer.together:
            part += layer.shared_stream.start_reduce(total).wait()
        dx = self.norm.input_grad(part, dy, x, *numbers)
        return dx if wanted else None

    def _shared_backward(
        self, y: torch.Tensor, upper: torch.Tensor, whole: torch.Tensor, uppers: torch.Tensor, kept: Tensors
    ) -> torch.Tensor:
        """Return this rank's summand of the gradient of the shared expert's tokens, [T, h].

        y, upper [T', h]: the input and the gradient of the result; whole, uppers: of the experts' tokens.
        """
        layer, stream = self.layer, self.layer.shared_stream
        assert layer.shared is not None
        if not layer.together:
            both = stream.start_unshard(y), stream.start_unshard(upper)
            whole, uppers = both[0].wait(), both[1].wait()
        gate = None if layer.shared_gate is None else layer.shared_gate(whole)
        dx, dgate = layer.shared.backward(uppers, whole, gate, groups=RowGroups.one(whole), kept=kept)
        return dx if layer.shared_gate is None else dx.add_(layer.shared_gate.backward(dgate, whole))


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, branch, options, handle):
        y, saved, ctx.dispatch = branch.forward(x, *options)
        ctx.save_for_backward(*(tensor for part in saved for tensor in part))
        ctx.branch, ctx.lengths = branch, [len(part) for part in saved]
        return y

    @staticmethod
    def backward(ctx, dy):
        tensors = iter(ctx.saved_tensors)
        saved = [tuple(next(tensors) for _ in range(length)) for length in ctx.lengths]
        return ctx.branch.backward(dy, ctx.needs_input_grad[0], saved, ctx.dispatch), None, None, None
