"""ZeRO-DP: one mechanism; the stage only chooses which of three things are cut over the ranks that share a copy.

| where                                        | 0          | 1              | 2          | 3                 |
|----------------------------------------------|------------|----------------|------------|-------------------|
| owned range of a unit's flat buffer          | all        | 1/N            | 1/N        | 1/N               |
| reduce()                                     | all-reduce | reduce-scatter | same       | same              |
| a micro-batch's gradients of a unit are in   | keep adding, reduce on the final one | reduce now | same |
| gather() / release() around use              | -          | -              | -          | all-gather / free |
| publish() after the update                   | copy       | all-gather     | all-gather | keep the shard    |

Weights and gradients of a unit have two lifetimes that share no flag. Weights are held by a count of users (a forward,
an open backward, a kept head, a recompute) and released by the last. Gradients are counted by the contributions that
a micro-batch owes. Nothing here knows of pipelines, models or recompute.

Communication is behind computation: a unit's reduction is under way while the next unit's gradients are made, the
next layer's weights arrive while this one computes, an update is published until the weights are used. Whoever needs
the result waits for it; that is the only difference that `overlap` makes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn

from megazero.model.context import Write
from megazero.plan.parameters import ParamSpec
from megazero.plan.zero_policy import Use, plan_buckets
from megazero.zero.adamw import Update
from megazero.zero.reduce_scatter import Reducer
from megazero.zero.unit import Initial, ParamUnit, Ring, ZeroOptions


class _Opens(torch.autograd.Function):
    """Behind a layer: its backward is about to begin."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, begin: Callable[[], None]) -> torch.Tensor:
        ctx.begin = begin
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        ctx.begin()
        return dy, None


class _Closes(torch.autograd.Function):
    """Before a layer: its input gradient is done, its weights are not needed again.

    `anchor` requires a gradient, so that backward comes here although x may need none, its producers being frozen.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor, end: Callable[[], None]) -> torch.Tensor:
        ctx.end = end
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> Any:
        ctx.end()
        return dx, None, None


@dataclasses.dataclass
class _Layer:
    """A layer's use of its units, and its neighbours in the order of the forward pass."""

    use: Use
    units: list[ParamUnit]
    before: _Layer | None = None
    behind: _Layer | None = None


class Zero:
    """Owns every parameter of a pipeline stage, its gradients and its optimizer states.

    `contribute` goes into the layers' constructor, `adopt` gives the parameters memory, `run` calls the layers.
    """

    def __init__(self, options: ZeroOptions) -> None:
        self.options, self.policy, self.mesh = options, options.policy, options.mesh
        self.units: dict[str, ParamUnit] = {}
        self.unit_of: dict[nn.Parameter, ParamUnit] = {}
        self.layers: dict[nn.Module, _Layer] = {}
        self.in_backward = False
        self.final = False  # no later micro-batch of the iteration adds gradients
        self.anchor = torch.zeros((), device=self.mesh.device, requires_grad=True)

    def adopt(
        self,
        units: Mapping[str, list[tuple[ParamSpec, nn.Parameter]]],
        uses: Mapping[nn.Module, tuple[Use, list[str]]],
        initial: Initial,
    ) -> None:
        """Give every parameter its memory.

        Args:
            units: unit name -> its parameters.
            uses: layer -> how it uses which units, in the order of the forward pass. Each use owes each trainable
                parameter of the units one gradient a micro-batch.
            initial: a parameter's initial values.
        """
        for name, members in units.items():
            self.units[name] = ParamUnit(name, members, self.options, initial)
        self._settle()
        self.unit_of = {p: u for u in self.units.values() for p in u.windows}
        last: _Layer | None = None
        for module, (use, names) in uses.items():
            layer = _Layer(use, [self.units[name] for name in names], before=last)
            if last is not None:
                last.behind = layer
            self.layers[module] = last = layer
            for unit in layer.units:
                unit.expected += len(unit.trainable)
        o, sizes = self.options, [u.flat.numel for u in self.units.values()]
        self.ring = Ring(sizes, o)
        buckets = plan_buckets(o.bucket_size, sizes if o.policy.optimizer else [], self.mesh.shard.size, o.overlap)
        self.reducer = Reducer(self.mesh.shard, buckets, o.grad_dtype, self.mesh.device, o.ledger, o.overlap)
        self.at_rest = o.ledger.lease("buffers", self.ring.num_bytes)

    def _settle(self) -> None:
        """MD: gradients that outlive their unit's backward, side by side in one allocation."""
        sizes = [numel for unit in self.units.values() for numel in unit.fixed_numel]
        arena = torch.empty(sum(sizes), dtype=self.options.grad_dtype, device=self.mesh.device)
        parts = iter(arena.split(sizes))
        for unit in self.units.values():
            unit.settle(next(parts), next(parts))

    # -- weights

    def run(self, layer: nn.Module, *args: Any) -> torch.Tensor:
        """layer(*args) with its weights present, and again while its backward runs."""
        used = self.layers[layer]
        if not self.policy.parameters:
            for unit in used.units:
                unit.wait()
            return layer(*args)
        kept, in_backward = used.use.value if torch.is_grad_enabled() else (False, False)
        self._gather(used)
        if not self.in_backward:  # else it is a recompute, after which nothing follows forward
            self._prefetch(used.behind)
        try:
            if not in_backward:
                return layer(*args)
            x, *rest = args
            y = layer(_Closes.apply(x, self.anchor, lambda: self._release(used)), *rest)
            return _Opens.apply(y, lambda: self._open(used))
        finally:  # checkpoint leaves a recompute early, by an exception
            if not kept:
                self._release(used)  # a recompute runs inside an open backward, which is a user too

    def _open(self, layer: _Layer) -> None:
        """A layer's backward begins."""
        if layer.use is not Use.HEAD:  # whose weights are still there
            self._gather(layer)
        if layer.before is not None and layer.before.use is Use.LAYER:
            self._prefetch(layer.before)

    def _gather(self, layer: _Layer) -> None:
        for unit in layer.units:
            if self.policy.keeps_gathered and not unit.held and torch.is_grad_enabled():
                unit.held = True
                unit.gather(self.ring)  # a user more, until the end of the iteration
            unit.gather(self.ring)

    def _prefetch(self, layer: _Layer | None) -> None:
        if layer is not None and self.options.overlap:
            for unit in layer.units:
                unit.prefetch(self.ring)

    def _release(self, layer: _Layer) -> None:
        for unit in layer.units:
            unit.release(self.ring)

    # -- gradients

    def contribute(self, parameter: nn.Parameter, write: Write) -> None:
        """Take a parameter's gradient; reduce its unit when it is due."""
        unit = self.unit_of[parameter]
        if parameter not in unit.trainable:
            return
        if unit.contribute(parameter, write) and (self.policy.gradients or self.final):
            unit.reduce(self.reducer)

    @contextmanager
    def backward(self, final: bool) -> Iterator[None]:
        """Around a micro-batch's backward; `final`: the last of this iteration."""
        self.in_backward, self.final = True, final
        try:
            yield
        finally:
            self.in_backward, self.final = False, False

    def sum_gradients(self, tied: str | None) -> None:
        """After the last backward: everything is reduced; sum the tied unit, if any, over both pipeline ends.

        Raises:
            RuntimeError: naming the trainable parameters that took no part in the iteration.
        """
        self.reducer.drain()
        for unit in self.units.values():
            unit.require_gradients()
            assert unit.full is None, f"{unit.name}: not reduced"
            if unit.held:
                unit.held = False
                unit.release(self.ring)
            assert unit.users == 0, f"{unit.name}: still has {unit.users} users"
            unit.reduce_replicas()
        for unit in self.units.values():
            unit.sum_replicated()
        for unit in self.units.values():
            unit.reducing.wait()
        if tied is not None and tied in self.units:
            reduced = self.units[tied].reduced
            if reduced is not None:
                self.mesh.ends.all_reduce_(reduced.data)

    @property
    def trained(self) -> list[ParamUnit]:
        """Units that are not frozen whole."""
        return [unit for unit in self.units.values() if unit.trainable]

    def gradient_norm(self, tied: str | None) -> float:
        """Global L2 norm; what is cut, replicated or tied is counted once."""
        mesh = self.mesh
        total = torch.zeros((), dtype=torch.float64, device=mesh.device)
        for unit in self.trained:
            if unit.name != tied or mesh.pp.is_first:
                total += unit.square_sum(replicated=mesh.tp.is_first)
        axes = [mesh.tp, mesh.pp] + [mesh.shard] * self.policy.optimizer
        return float(mesh.control_sum(total, *axes).sqrt())

    # -- the update

    def update(self, update: Update) -> None:
        """Unit by unit: cast, AdamW, publish."""
        for unit in self.trained:
            unit.update(update)

    def discard_gradients(self) -> None:
        """Skip an update; or, on a single process, forget what a step that ended in an exception has left.

        With several, a rank's exception ends the run.
        """
        for unit in self.units.values():
            unit.discard()

    def first_nonfinite(self) -> str | None:
        """Name of the first parameter of this rank's whose gradient is not finite."""
        return next((name for unit in self.trained if (name := unit.first_nonfinite()) is not None), None)

    def wait(self) -> None:
        """For all that is under way: before the ranks part."""
        for unit in self.units.values():
            unit.wait()
