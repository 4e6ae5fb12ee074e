"""Statistics per layer of a step (--stats-interval): norms of gradients, updates, activations, attention logits."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from megazero.engine.mesh.collectives import MAX
from megazero.engine.model.layers.attention import Attention
from megazero.engine.model.layers.context import MicroBatchInfo
from megazero.engine.options.batch_sizes import PADDING
from megazero.engine.options.optimizers import TOGETHER
from megazero.engine.plan.layout.parameters import EXPERTS
from megazero.engine.plan.program.operations import Forward, GradNorm, Op, Update
from megazero.engine.step.engine import Engine
from megazero.engine.zero.norms import square_sums
from megazero.engine.zero.zero import ParamUnit
from megazero.observe.largest_logit import largest_logit
from megazero.planner.bytes.statistics import MAXIMA, SUMS

GRADIENT, UPDATE, WEIGHT = range(SUMS)  # squares
ACTIVATION, LOGIT = range(MAXIMA)
KEYS = "layer_grad_norm", "layer_update_ratio", "layer_max_activation", "layer_max_logit"  # of metrics.jsonl


class LayerStatistics:
    """An observer of the interpreter for a step; all ranks call `begin` and `end` together.

    Attributes:
        sums: device -> [SUMS, layers of the model] fp64, this rank's summands.
        maxima: [MAXIMA, layers] fp64, of this rank; -inf: none.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.mesh, self.run = engine, engine.mesh, engine.interpreter
        self.numbers = {name: number for number, name in enumerate(engine.layers.kinds)}
        frozen = engine.config.training.freeze_parameters
        self.trained = {
            name
            for name, kind in engine.layers.kinds.items()
            if any(spec.trains for spec in kind.params_of(name, frozen))
        }
        self._around: dict[type, Callable[[Any], AbstractContextManager[None]]] = {
            Forward: self._forward,
            GradNorm: self._norm,
            Update: self._update,
        }

    def begin(self) -> None:
        """Observe the next step, besides the observer that is set."""
        layers, device = len(self.numbers), self.mesh.device
        devices = {device, *(unit.home.device for unit in self.engine.zero.units.values())}
        self.sums = {place: torch.zeros(SUMS, layers, dtype=torch.float64, device=place) for place in devices}
        self.maxima = torch.full((MAXIMA, layers), -torch.inf, dtype=torch.float64, device=device)
        self.inner, self.run.observe = self.run.observe, self

    @contextlib.contextmanager
    def __call__(self, op: Op) -> Iterator[None]:
        around = self._around.get(type(op))
        with (
            contextlib.nullcontext() if around is None else around(op),
            contextlib.nullcontext() if self.inner is None else self.inner(op),
        ):
            yield

    def end(self, grad_norm: float) -> dict[str, dict[str, float]]:
        """Return the statistics by key of metrics.jsonl and by layer, the same on all ranks.

        Args:
            grad_norm: of the step, whose square is the sum of the layers' squares.
        """
        self.run.observe = self.inner
        sums = sum(each.to(self.mesh.device) for each in self.sums.values())
        assert isinstance(sums, torch.Tensor)
        self.mesh.world.all_reduce_(sums, kind="control")
        self.mesh.world.all_reduce_(self.maxima, MAX, kind="control")
        values, layers = self.mesh.read(torch.cat([sums.flatten(), self.maxima.flatten()])), len(self.numbers)
        gradients, updates, weights, activations, logits = (
            dict(zip(self.numbers, values[at : at + layers], strict=True)) for at in range(0, len(values), layers)
        )
        total = sum(gradients.values())
        found = (
            {
                name: grad_norm * math.sqrt(gradients[name] / total) if total else 0.0
                for name in self.numbers
                if name in self.trained
            },
            {name: math.sqrt(updates[name] / square) for name, square in weights.items() if square},
            {name: value for name, value in activations.items() if value != -math.inf},
            {name: value for name, value in logits.items() if value != -math.inf},
        )
        return {key: each for key, each in zip(KEYS, found, strict=True) if each}

    # -- around operations

    @contextlib.contextmanager
    def _forward(self, op: Forward) -> Iterator[None]:
        """Find the largest output of a layer and, in the first micro-batch of the global batch, its largest logit."""
        tokens: MicroBatchInfo = self.run.micro_batches[op.micro_batch].tokens
        watched = self.mesh.dp.is_first and op.micro_batch == 0 and op.layer in self.engine.layers.blocks
        parts = self.engine.model.layer(op.layer).modules() if watched else ()
        attentions = [part for part in parts if isinstance(part, Attention)]

        def watch(attention: Attention, heads: Sequence[torch.Tensor], tokens: MicroBatchInfo) -> None:
            self._update_maximum(LOGIT, op.layer, largest_logit(attention, heads, tokens, self.engine.tracker))

        for attention in attentions:
            attention.watch = watch
        try:
            yield
        finally:
            for attention in attentions:
                attention.watch = None
        x = self.run.x.get(op.micro_batch)  # none after the head
        if x is not None:
            for part in _of_samples(x, tokens):
                self._update_maximum(ACTIVATION, op.layer, torch.linalg.vector_norm(part, math.inf))

    def _update_maximum(self, kind: int, layer: str, value: torch.Tensor) -> None:
        largest = self.maxima[kind, self.numbers[layer]]
        torch.maximum(largest, value.to(largest.dtype), out=largest)

    @contextlib.contextmanager
    def _norm(self, op: GradNorm) -> Iterator[None]:
        yield
        for unit in self.engine.zero.trained_units:
            self._add(GRADIENT, unit, unit.gradients.counted())

    @contextlib.contextmanager
    def _update(self, op: Update) -> Iterator[None]:
        """Compare a unit's master weights with a copy from before the update."""
        unit = self.engine.zero.units[op.unit]
        optimizer, numel = unit.optimizer, unit.flat.owned.numel
        pieces = [slice(at, min(at + TOGETHER, numel)) for at in range(0, numel, TOGETHER)]
        old = torch.empty(numel, dtype=optimizer.dtype, device=unit.home.device)
        held = self.engine.tracker.allocate(unit.home.scratch_kind, old.nbytes)
        for piece in pieces:
            old[piece] = optimizer.master.read(piece)
        self._add(WEIGHT, unit, unit.gradients.pieces(_of_trained(unit, old)))
        yield
        for piece in pieces:
            old[piece].sub_(optimizer.master.read(piece))
        self._add(UPDATE, unit, unit.gradients.pieces(_of_trained(unit, old)))
        held.end()

    def _add(self, kind: int, unit: ParamUnit, pieces: Sequence[torch.Tensor | float]) -> None:
        """Add the squares of a unit's pieces, unless another rank adds them."""
        layer, device = unit.name.removesuffix(EXPERTS), unit.home.device
        if self._is_first_copy(unit):
            self.sums[device][kind, self.numbers[layer]] += square_sums([pieces], device)[0]

    def _is_first_copy(self, unit: ParamUnit) -> bool:
        """Return whether no rank before this one has the same part of a unit."""
        if unit.name == self.engine.layers.tied and not self.mesh.pp.is_first:
            return False
        group = unit.flat.group
        if not group.norm_axis:
            return self.mesh.data.is_first
        return group.norm_axis != group.axis or self.mesh.axis(group.replica_axis).is_first


def _of_samples(x: torch.Tensor, tokens: MicroBatchInfo) -> list[torch.Tensor]:
    """Return the parts of x [T', h] that are no padding samples."""
    if PADDING not in tokens.samples:
        return [x]
    parts = x.split([row.count for row in tokens.rows])
    return [part for part, row in zip(parts, tokens.rows, strict=True) if row.sample != PADDING]


def _of_trained(unit: ParamUnit, values: torch.Tensor) -> torch.Tensor:
    """Set the values [owned] of frozen weights to 0, and return all."""
    for weight, _, _, owned in unit.flat.owned_parts():
        if not weight.trains:
            values[owned.slice()] = 0
    return values
