"""Optimizer states of a unit, for the owned range alone: master weights and AdamW's moments."""

from __future__ import annotations

import torch

from megazero.zero.adamw import StepParams, adamw_
from megazero.zero.flat_unit import FlatUnit, OwnedPart, ZeroOptions
from megazero.zero.reduce_scatter import Buffer


class OptimizerShard:
    """Master weights and moments of one unit, in fp32 (fp64 with --precision fp64).

    master   [owned]  what the optimizer steps. Where the compute dtype is as wide, it *is* the sharded weights.
    moments  2 x [owned]; [0] in a run that does not train
    """

    def __init__(self, unit: FlatUnit, weights: torch.Tensor, options: ZeroOptions) -> None:
        """Draw the initial values of the owned range. `weights` [owned]: the sharded weights."""
        self.unit, self.options, self.weights = unit, options, weights
        dtype = options.master_dtype
        in_place = weights.dtype == dtype
        self.master = weights if in_place else torch.zeros(unit.owned.numel, dtype=dtype, device=weights.device)
        numel = unit.owned.numel if options.trains else 0
        self.moments = tuple(torch.zeros(numel, dtype=dtype, device=weights.device) for _ in range(2))
        held = (0 if in_place else self.master.nbytes) + sum(moment.nbytes for moment in self.moments)
        self.allocation = options.tracker.allocate("optimizer", held)
        for part in unit.owned_parts():
            self.master[part.owned.slice()] = part.weight.initial(part.start, part.stop).to(weights.device)
        self.cast()

    def step(self, params: StepParams, gradient: Buffer) -> None:
        """Step the master weights with the reduced gradient, free that, and cast the weights."""
        self.options.mesh.in_flight.check(f"the update of {self.unit.name}", writes=[self.weights])
        values, wide = gradient.data, gradient.data.dtype == self.master.dtype
        widened = self.options.tracker.allocate("buffers", 0 if wide else self.master.nbytes)
        if not wide:
            values = values.to(self.master.dtype)
        adamw_(params, self.master, values, self.moments, self.unit.num_decayed)
        widened.end()
        gradient.allocation.end()
        self.cast()

    def cast(self) -> None:
        """Copy the master weights to this rank's compute weights."""
        if self.master is not self.weights:
            self.weights.copy_(self.master)

    def state(self, part: OwnedPart) -> dict[str, torch.Tensor]:
        """Return what a checkpoint holds of a part: [stop - start] each; no moments in a run that does not train."""
        tensors = {"master": self.master}
        if self.options.trains:
            tensors |= {"exp_avg": self.moments[0], "exp_avg_sq": self.moments[1]}
        return {name: tensor[part.owned.slice()] for name, tensor in tensors.items()}
