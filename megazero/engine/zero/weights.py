"""Weights of a unit in the compute dtype: the owned shard, and the whole weights while they are in use."""

import torch

from megazero.engine.mesh.collectives import Pending
from megazero.engine.zero.flat_unit import FlatUnit, ZeroOptions


class UnitWeights:
    """Weights of one unit.

    sharded    [owned]  this rank's range; a window of `unsharded` if all weights are kept.
    unsharded  [numel]  all weights: always (stages 0 to 2), or in the arena while in use and else None (stage 3).
    """

    def __init__(self, unit: FlatUnit, options: ZeroOptions) -> None:
        self.unit, self.options = unit, options
        dtype, device = options.dtype, options.mesh.device
        self.unsharded: torch.Tensor | None = None
        if unit.policy.parameters:
            self.sharded = torch.zeros(unit.owned.numel, dtype=dtype, device=device)
            kept = self.sharded
        else:
            kept = self.unsharded = torch.zeros(unit.numel, dtype=dtype, device=device)
            self.sharded = kept[unit.owned.slice()]
        self.allocation = options.tracker.allocate("parameters", kept.nbytes)
        self._released = torch.full((), torch.nan, dtype=dtype, device=device)
        # offset of the whole weights in the arena (None: released) -> a view per parameter
        self._views: dict[int | None, list[torch.Tensor]] = {}
        self._point()

    def _point(self) -> None:
        """Point every parameter into `unsharded` or, if released, at one NaN expanded to its shape."""
        whole = self.unsharded
        at = None if whole is None else int(whole.storage_offset())
        if at not in self._views:
            self._views[at] = [
                self._released.expand(member.weight.block.stored)
                if whole is None
                else whole[member.window.slice()].view(member.weight.block.stored)
                for member in self.unit.members
            ]
        for member, view in zip(self.unit.members, self._views[at], strict=True):
            member.weight.data = view

    def start_all_gather(self, arena: torch.Tensor, offset: int) -> Pending:
        """Stage 3: all-gather the weights into `arena` at element `offset`. The wait points the parameters at them."""
        assert self.unsharded is None, f"{self.unit.name} is already gathered"
        self.unsharded = arena[offset : offset + self.unit.numel]
        gather = self.unit.shard.start_all_gather(self.sharded, self.unsharded, self.unit.uneven)

        def received() -> None:
            gather.wait()
            self._point()

        return Pending(then=received)

    def forget_arena(self) -> None:
        """Drop all views of the arena before it is reallocated."""
        if not self.unit.policy.parameters:
            return
        assert self.unsharded is None, f"{self.unit.name} is gathered"
        self._views = {}
        self._point()

    def release(self) -> None:
        """Stage 3: free the part of the arena."""
        assert self.unsharded is not None, f"{self.unit.name} is not gathered"
        if self.options.config.zero.poison_buffers:
            self.unsharded.fill_(torch.nan)
        self.unsharded = None
        self._point()

    def start_sync(self) -> Pending:
        """Stages 1 and 2: all-gather the updated shards into the whole weights of all ranks."""
        if not self.unit.policy.syncs:
            return Pending()
        assert self.unsharded is not None
        return self.unit.shard.start_all_gather(self.sharded, self.unsharded, self.unit.uneven)
