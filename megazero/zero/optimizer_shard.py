"""Optimizer states of a unit's owned range: master weights, and the states of the update rules."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megazero.comm.mesh.collectives import Pending
from megazero.config.optimizers import UpdateRule
from megazero.model.layers.context import DTYPES
from megazero.optim.step import StepParams
from megazero.optim.updates import MATRIX_UPDATES, UPDATES
from megazero.plan.layout.flat_layout import Range
from megazero.zero.flat_unit import FlatUnit, OwnedPart, ZeroOptions
from megazero.zero.host_buffer import HostBuffer
from megazero.zero.reduce_scatter import Buffer


class RuledPart(NamedTuple):
    """A part of the owned range whose weights have the same rule.

    Attributes:
        owned: the part, counted from the start of the owned range.
        states: in the order of the rule's; [n] each, [0] in a run that does not train.
    """

    rule: UpdateRule
    owned: Range
    states: tuple[torch.Tensor, ...]


class OptimizerShard:
    """Master weights and states of one unit, in fp32 (fp64 with --precision fp64), on the device or in host memory.

    master  [owned]  updated by the optimizer; on the device, the same tensor as sharded weights that are as wide
    """

    def __init__(
        self, unit: FlatUnit, weights: torch.Tensor, options: ZeroOptions, host: HostBuffer | None = None
    ) -> None:
        """Draw the initial values of the owned range.

        Args:
            weights: the sharded weights, [owned].
            host: memory of a unit with states in host memory.
        """
        self.unit, self.options, self.weights, self.host = unit, options, weights, host
        dtype, optimizer = options.master_dtype, options.optimizer
        device = options.mesh.device if host is None else torch.device("cpu")
        copies = host is not None or weights.dtype != dtype
        self.master = torch.zeros(unit.owned.numel, dtype=dtype, device=device) if copies else weights
        self.parts = [
            RuledPart(rule, part, self._states(rule, part.numel if options.trains else 0))
            for rule, part in unit.by_rule(optimizer)
        ]
        ruled = [(rule, self.unit.matrices(part)) for rule, part, _ in self.parts]
        self.matrices = [each if rule.whole_matrices else [] for rule, each in ruled]
        self.product_dtype = weights.dtype if weights.dtype == torch.bfloat16 else dtype
        held = self.master.nbytes * copies + sum(state.nbytes for part in self.parts for state in part.states)
        self.allocation = options.tracker.allocate("optimizer" if host is None else "host", held)
        for owned in unit.owned_parts():
            self.master[owned.owned.slice()] = owned.weight.initial(owned.start, owned.stop).to(device)
        self.cast()

    def _states(self, rule: UpdateRule, numel: int) -> tuple[torch.Tensor, ...]:
        dtypes = [DTYPES[state.precision] if state.precision else self.master.dtype for state in rule.states]
        return tuple(torch.zeros(numel, dtype=dtype, device=self.master.device) for dtype in dtypes)

    def step(self, params: StepParams, gradient: Buffer) -> None:
        """Update the master weights, free the reduced gradient, and cast the weights.

        Args:
            params: with tensors in the place of the states.
        """
        self.options.mesh.in_flight.check(f"the update of {self.unit.name}", writes=[self.weights])
        values, wide = gradient.data, gradient.data.dtype == self.master.dtype
        tracker, kind = self.options.tracker, "buffers" if self.host is None else "host"
        widened = tracker.allocate(kind, 0 if wide else self.master.nbytes)
        largest = max((each.working for several in self.matrices for each in several), default=0)
        working = tracker.allocate(kind, largest * self.product_dtype.itemsize)
        values = values.to(self.master.dtype)
        for (rule, part, states), matrices in zip(self.parts, self.matrices, strict=True):
            arguments = self.master[part.slice()], values[part.slice()], states, self.unit.decayed.within(part).numel
            if rule.whole_matrices:
                MATRIX_UPDATES[rule.name](params, *arguments, matrices, self.product_dtype)
            else:
                UPDATES[rule.name](params, *arguments)
        widened.end()
        working.end()
        gradient.allocation.end()
        self.cast()

    def cast(self) -> None:
        """Copy the master weights to this rank's compute weights; on the host, to the source of `start_fetch`."""
        if self.host is not None:
            self.host.weights.copy_(self.master)
        elif self.master is not self.weights:
            self.weights.copy_(self.master)

    def start_fetch(self) -> Pending:
        """Copy the weights that the host has updated to the device."""
        if self.host is None:
            return Pending()
        return Pending(then=self.host.link.start_fetch(self.host.weights, self.weights).wait)

    def state(self, part: OwnedPart) -> dict[str, torch.Tensor]:
        """Return the tensors of a part in a checkpoint, [stop - start] each; no states if the run does not train."""
        found = {"master": self.master[part.owned.slice()]}
        if not self.options.trains:
            return found
        rule = self.options.optimizer.rule(part.spec.matrices is not None)
        mine = ((ruled, states) for each, ruled, states in self.parts if each == rule)
        ruled, states = next(both for both in mine if part.owned.within(both[0]).numel == part.owned.numel)
        inner = part.owned.within(ruled)
        return found | {kept.name: data[inner.slice()] for kept, data in zip(rule.states, states, strict=True)}
