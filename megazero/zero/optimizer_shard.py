"""Optimizer states of a unit's owned range: master weights, and the states of the update rule."""

from __future__ import annotations

import torch

from megazero.comm.mesh.collectives import Pending
from megazero.model.layers.context import DTYPES
from megazero.optim.step import StepParams
from megazero.optim.updates import UPDATES
from megazero.zero.flat_unit import FlatUnit, OwnedPart, ZeroOptions
from megazero.zero.reduce_scatter import Buffer


class OptimizerShard:
    """Master weights and states of one unit, in fp32 (fp64 with --precision fp64), on the device that the rule chooses.

    master  [owned]  updated by the optimizer; the same tensor as the sharded weights unless the rule `copies_master`
    states  name -> [owned]; [0] in a run that does not train
    """

    def __init__(self, unit: FlatUnit, weights: torch.Tensor, options: ZeroOptions) -> None:
        """Draw the initial values of the owned range. `weights` [owned]: the sharded weights."""
        self.unit, self.options, self.weights, rule = unit, options, weights, options.rule
        self.update = UPDATES[rule.name]
        dtype, device = options.master_dtype, options.state_device
        copies = rule.copies_master(weights.dtype.itemsize, dtype.itemsize)
        self.master = torch.zeros(unit.owned.numel, dtype=dtype, device=device) if copies else weights
        numel = unit.owned.numel if options.trains else 0
        self.states = {
            state.name: torch.zeros(numel, dtype=DTYPES[state.precision] if state.precision else dtype, device=device)
            for state in rule.states
        }
        held = self.master.nbytes * copies + sum(state.nbytes for state in self.states.values())
        self.allocation = options.tracker.allocate("optimizer" if rule.place == "device" else "host", held)
        for part in unit.owned_parts():
            self.master[part.owned.slice()] = part.weight.initial(part.start, part.stop).to(device)
        self.cast()

    def start_step(self, params: StepParams, gradient: Buffer) -> Pending:
        """Update the master weights, free the reduced gradient, and cast the weights.

        A device's update is issued now. The host's runs when the caller waits.
        """
        if self.options.rule.place == "device":
            self._step(params, gradient)
            return Pending()
        return Pending(then=lambda: self._step(params, gradient))

    def _step(self, params: StepParams, gradient: Buffer) -> None:
        self.options.mesh.in_flight.check(f"the update of {self.unit.name}", writes=[self.weights])
        values, wide = gradient.data, gradient.data.dtype == self.master.dtype
        widened = self.options.tracker.allocate("buffers", 0 if wide else self.master.nbytes)
        values = values.to(self.master.device, self.master.dtype)
        self.update(params, self.master, values, tuple(self.states.values()), self.unit.num_decayed)
        widened.end()
        gradient.allocation.end()
        self.cast()

    def cast(self) -> None:
        """Copy the master weights to this rank's compute weights."""
        if self.master is not self.weights:
            self.weights.copy_(self.master)

    def state(self, part: OwnedPart) -> dict[str, torch.Tensor]:
        """Return the tensors of a part in a checkpoint, [stop - start] each; no states if the run does not train."""
        tensors = {"master": self.master} | (self.states if self.options.trains else {})
        return {name: tensor[part.owned.slice()] for name, tensor in tensors.items()}
