"""A mixture of experts in place of a block's MLP: x + sum over a token's experts of weight * expert(norm(x)).

Tokens are sorted by expert, and the products of all experts are one grouped product. No token is dropped. A result's
weight is applied before the expert's second product: that product is linear, and so the weight's gradient needs no
result of an expert. Inner widths are sharded over tp, as an MLP's.

Shapes: T tokens, T' those of the residual stream on this rank, h hidden, E experts, k experts of a token, R = T k rows,
f width inside an expert; /tp = this rank's part.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn as nn

from megazero.config.schema import ModelConfig
from megazero.kernels.eager import wide
from megazero.kernels.grouped import GroupedProducts, RowGroups, is_fused
from megazero.kernels.table import GATED
from megazero.model.layers.balance import Route
from megazero.model.layers.context import Context, MicroBatchInfo
from megazero.model.layers.linear import Residual
from megazero.model.layers.norm import Norm
from megazero.model.layers.router import Routed, Router
from megazero.model.layers.weight import GradWriter, handle_of

Tensors = tuple[torch.Tensor, ...]


class GroupedLinear(nn.Module):
    """E linear layers, or one: y [R, out] = x [R, in] @ weight[.., out, in].T with the matrix of each row's group.

    Args:
        shape: of the weight; all but the last dim are out, except a first dim of `experts`.
        experts: 0: one layer, without that dim.
        top: experts of a token.
    """

    def __init__(self, context: Context, *shape: int, experts: int, top: int, sharded: int, std: float) -> None:
        super().__init__()
        self.context, self.count = context, experts or 1
        self.products = GroupedProducts(context.products)
        self.weight = context.weight(
            *((experts,) if experts else ()),
            *shape,
            sharded={sharded + (experts > 0): "tp"},
            std=std,
            decays=True,
            per_token=(top, experts) if experts else (1, 1),
        )
        self.weights = (self.weight,)

    @property
    def matrices(self) -> torch.Tensor:
        """[E, out, in]"""
        data = self.weight.data
        return data.view(self.count, -1, data.shape[-1])

    def output(self, x: torch.Tensor, groups: RowGroups) -> torch.Tensor:
        return self.products.output(x, self.matrices, groups)

    def backward(self, dy: torch.Tensor, x: torch.Tensor, groups: RowGroups) -> None:
        """Hand over the weight's gradient."""

        write = functools.partial(self.products.weight_grad, groups)
        self.weight.accumulate_grad(GradWriter(write, (x, dy)))

    def input_grad(self, dy: torch.Tensor, groups: RowGroups) -> torch.Tensor:
        return self.products.input_grad(dy, self.matrices, groups)


class ExpertMLPs(nn.Module):
    """E MLPs of one width, or one: down(weight * activation(up(x))), with a weight per row. Below autograd."""

    def __init__(self, model: ModelConfig, context: Context, width: int, experts: int = 0) -> None:
        super().__init__()
        h, name = model.hidden_size, model.traits.activation
        out, dim = ((2, width), 1) if name in GATED else ((width,), 0)
        options = {"experts": experts, "top": model.moe_router_topk}
        self.up = GroupedLinear(context, *out, h, sharded=dim, std=model.init_method_std, **options)
        self.down = GroupedLinear(context, h, width, sharded=1, std=model.residual_std, **options)
        self.weights = (self.up.weight, self.down.weight)
        self.activation, self.selective = context.kernels.activation(name), context.selective

    def forward(
        self, x: torch.Tensor, weights: torch.Tensor | None, groups: RowGroups, output: bool
    ) -> tuple[torch.Tensor | None, Tensors]:
        """x [R, h], weights [R], None: 1 -> this rank's summand [R, h], None unless `output`; and tensors to save."""
        up = self.up.output(x, groups)
        inner = self.activation.forward(up)
        kept = (up,) if self.selective else (up, inner)
        return (self.down.output(_scaled(inner, weights), groups) if output else None), kept

    def backward(
        self, dy: torch.Tensor, x: torch.Tensor, weights: torch.Tensor | None, groups: RowGroups, kept: Tensors
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """dy [R, h] -> gradients of x and, this rank's summand, of the weights."""
        up = kept[0]
        inner = self.activation.forward(up) if self.selective else kept[1]
        dinner, dweights = self.down.input_grad(dy, groups), None
        self.down.backward(dy, _scaled(inner, weights), groups)
        if weights is not None:
            dweights = (dinner.to(weights.dtype) * inner).sum(-1)
            dinner = _scaled(dinner, weights)
        dup, _ = self.activation.grad(dinner, up)
        self.up.backward(dup, x, groups)
        return self.up.input_grad(dup, groups), dweights


def _scaled(x: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """x [R, f], weights [R] in a type as wide or wider -> their product in x's type"""
    return x if weights is None else (x * weights[:, None]).to(x.dtype)


class Gate(nn.Module):
    """sigmoid(x @ weight.T), the factor of the shared expert, in fp32 or wider. Below autograd."""

    def __init__(self, model: ModelConfig, context: Context) -> None:
        super().__init__()
        self.weight = context.weight(1, model.hidden_size, std=model.init_method_std, decays=True, summed=("tp",))
        self.weights = (self.weight,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, h] -> [T]"""
        exact = wide(x)
        return (x.to(exact) @ self.weight.data[0].to(exact)).sigmoid_()

    def backward(self, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """dy [T], this rank's summand -> that of the gradient of x [T, h]."""
        y, exact = self(x), dy.dtype
        dy = dy * y * (1 - y)
        self.weight.add_grad((dy @ x.to(exact))[None])
        return torch.outer(dy, self.weight.data[0].to(exact)).to(x.dtype)


class Sorted(NamedTuple):
    """Tokens sorted by expert; a token has k rows.

    Attributes:
        order: row -> its place among the choices [T, k] of all tokens.
        groups: the experts' rows.
    """

    order: torch.Tensor
    groups: RowGroups

    @classmethod
    def of(cls, ids: torch.Tensor, experts: int, on_host: bool) -> Sorted:
        """ids [T, k]"""
        flat = ids.flatten().long()
        counts = flat.new_zeros(experts).scatter_add_(0, flat, torch.ones_like(flat))
        return cls(flat.argsort(stable=True), RowGroups.of(counts, len(flat), on_host))

    def rows(self, x: torch.Tensor, top: int) -> torch.Tensor:
        """x [T, c] -> [R, c], the rows of its k choices"""
        return x.index_select(0, self.order // top)

    def sum_rows(self, rows: torch.Tensor, top: int) -> torch.Tensor:
        """rows [R, c] -> [T, c], summed over the k choices in a fixed order"""
        return self.unsorted(rows).view(-1, top, rows.shape[1]).sum(1)

    def unsorted(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [R, ..] in the order of the choices"""
        return torch.empty_like(rows).index_copy_(0, self.order, rows)


class Experts(nn.Module):
    """The experts of a block, their router and, if there is one, the expert that all tokens pass."""

    def __init__(self, model: ModelConfig, number: int, context: Context) -> None:
        super().__init__()
        self.context, self.top, self.count = context, model.moe_router_topk, model.num_experts
        self.router = Router(model, number, context)
        self.experts = ExpertMLPs(model, context, model.expert_size, model.num_experts)
        shared = model.moe_shared_expert_intermediate_size
        self.shared = ExpertMLPs(model, context, shared) if shared else None
        self.shared_gate = Gate(model, context) if shared and model.moe_shared_expert_gate else None
        parts = self.router, self.experts, self.shared, self.shared_gate
        self.parts = [part for part in parts if part is not None]
        widths = model.hidden_size, model.expert_size // context.tp.size
        self.on_host = not is_fused(context.dtype, context.device, *widths)

    def forward(
        self, x: torch.Tensor, norm: Norm, residual: Residual, tokens: MicroBatchInfo, output: bool
    ) -> torch.Tensor:
        """x [T', h] -> x + experts(norm(x)) [T', h]; `residual` joins them."""
        handle = handle_of(norm, *self.parts, *residual.norms)
        return _Experts.apply(x, _Branch(self, norm, residual, tokens), (output, torch.is_grad_enabled()), handle)


class _Branch(NamedTuple):
    """Forward and backward of a micro-batch, below autograd."""

    layer: Experts
    norm: Norm
    residual: Residual
    tokens: MicroBatchInfo

    def forward(self, x: torch.Tensor, output: bool, has_graph: bool) -> tuple[torch.Tensor, list[Tensors], RowGroups]:
        """x [T', h] -> [T', h], tensors to save by part, and the experts' rows"""
        layer, context = self.layer, self.layer.context
        y, *numbers = self.norm.normalise(x)
        whole = context.stream.start_unshard(y).wait()
        routed = layer.router(whole, self.tokens, has_graph)
        route = routed.route
        by_expert = Sorted.of(route.ids, layer.count, layer.on_host)
        output = output or self.residual.norm is not None  # backward needs that norm's input
        weights = routed.weights.flatten().index_select(0, by_expert.order)
        rows, kept = layer.experts(by_expert.rows(whole, layer.top), weights, by_expert.groups, output)
        total = by_expert.sum_rows(rows, layer.top) if output else None
        kept_shared: Tensors = ()
        if layer.shared is not None:
            gate = None if layer.shared_gate is None else layer.shared_gate(whole)
            part, kept_shared = layer.shared(whole, gate, RowGroups.one(whole), output)
            total = total.add_(part) if output else None
        result, joined = torch.empty_like(x), ()
        if total is not None:
            result, joined = self.residual.join(x, context.stream.start_reduce(total).wait(), self.tokens.dropout_rows)
        saved = [
            (x, *numbers) if context.selective else (x, *numbers, y),
            (routed.logits, *(part for part in route if part is not None)),
            kept,
            kept_shared,
            joined,
        ]
        return result, saved, by_expert.groups

    def backward(self, dy: torch.Tensor, wanted: bool, saved: list[Tensors], groups: RowGroups) -> torch.Tensor | None:
        """dy [T', h] -> the gradient of x, if it is wanted"""
        layer, context, top = self.layer, self.layer.context, self.layer.top
        normed, (logits, ids, *counts), kept, kept_shared, joined = saved
        (x, *numbers), y = (normed, None) if context.selective else (normed[:-1], normed[-1])
        y = self.norm.normalise(x)[0] if y is None else y
        unsharding = context.stream.start_unshard(y)
        upper = self.residual.branch_grad(dy, self.tokens.dropout_rows, joined)
        upper = context.stream.start_unshard(upper).wait()
        whole = unsharding.wait()
        route = Route(ids, counts[0] if counts else None)
        routed = Routed(logits, route, layer.router.mixed(logits, route))
        by_expert = Sorted(ids.flatten().argsort(stable=True), groups)
        weights = routed.weights.flatten().index_select(0, by_expert.order)
        drows, dweights = layer.experts.backward(
            by_expert.rows(upper, top), by_expert.rows(whole, top), weights, groups, kept
        )
        assert dweights is not None
        total = by_expert.sum_rows(drows, top)
        total += layer.router.backward(by_expert.unsorted(dweights).view(-1, top), whole, routed, self.tokens)
        if layer.shared is not None:
            gate = None if layer.shared_gate is None else layer.shared_gate(whole)
            dshared, dgate = layer.shared.backward(upper, whole, gate, RowGroups.one(whole), kept_shared)
            total += dshared
            if layer.shared_gate is not None:
                total += layer.shared_gate.backward(dgate, whole)
        dx = self.norm.input_grad(context.stream.start_reduce(total).wait(), dy, x, *numbers)
        return dx if wanted else None


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, branch, options, handle):
        y, saved, ctx.groups = branch.forward(x, *options)
        ctx.save_for_backward(*(tensor for part in saved for tensor in part))
        ctx.branch, ctx.lengths = branch, [len(part) for part in saved]
        return y

    @staticmethod
    def backward(ctx, dy):
        tensors = iter(ctx.saved_tensors)
        saved = [tuple(next(tensors) for _ in range(length)) for length in ctx.lengths]
        return ctx.branch.backward(dy, ctx.needs_input_grad[0], saved, ctx.groups), None, None, None
