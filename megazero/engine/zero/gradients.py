"""Gradients of a unit: this rank's whole contribution, and the reduced gradient of its owned range."""

from collections.abc import Sequence

import torch

from megazero.engine.mesh.collectives import Pending, in_one_group
from megazero.engine.model.layers.weight import GradWriter, Weight
from megazero.engine.plan.layout.flat_layout import Range
from megazero.engine.plan.layout.zero_policy import persistent_gradients
from megazero.engine.zero.flat_unit import FlatUnit, ZeroOptions
from megazero.engine.zero.home import Buffer, Home, Reduced
from megazero.engine.zero.reduce_scatter import Reducer


class UnitGradients:
    """Gradients of one unit, in --grad-dtype.

    unsharded  [numel]  from `open` to `start_reduce`
    reduced    [owned]  their sum over the ranks that share a copy, from `start_reduce` to the update; in the unit's
                        home from `start_store` on
    """

    def __init__(self, unit: FlatUnit, options: ZeroOptions, home: Home) -> None:
        self.unit, self.options, self.mesh, self.home = unit, options, options.mesh, home
        self.unsharded: Buffer | None = None
        self.reduced: Reduced | None = None
        arena = options.config.activations.contiguous_checkpointing
        micro_batches = options.config.micro_batches(options.mesh.layout.dp)
        self.kept = persistent_gradients(unit.policy, arena, micro_batches, unit.on_host)
        self._persistent: tuple[torch.Tensor | None, torch.Tensor | None] = None, None  # see bind_persistent
        self._ranges = {member.weight: member.window.slice() for member in unit.members}
        self._windows: dict[Weight, torch.Tensor] = {}  # windows of `unsharded` that have a contribution
        self._complete = False  # every window has one, because of `start_fetch`

    # -- memory

    @property
    def persistent_numel(self) -> tuple[int, int]:
        """Elements of `unsharded` and `reduced` in the arena (--contiguous-checkpointing)."""
        if not self.unit.trains:
            return 0, 0
        return self.unit.numel * self.kept.unsharded, self.unit.owned.numel * self.kept.sharded

    def bind_persistent(self, unsharded: torch.Tensor, sharded: torch.Tensor) -> None:
        """Bind the buffers to slices of the persistent arena, `persistent_numel` elements each."""
        self._persistent = (unsharded if unsharded.numel() else None, sharded if sharded.numel() else None)
        tracker = self.options.tracker
        self.at_rest = (
            tracker.allocate(self._unsharded_kind, unsharded.nbytes),
            tracker.allocate("gradients", sharded.nbytes),
        )

    @property
    def _unsharded_kind(self) -> str:
        return "buffers" if self.unit.policy.optimizer else "gradients"

    def _buffer(self, kind: str, numel: int, persistent: torch.Tensor | None) -> Buffer:
        if persistent is not None:
            return Buffer(persistent, self.options.tracker.allocate(kind, 0))  # tracked since `bind_persistent`
        data = torch.empty(numel, dtype=self.options.grad_dtype, device=self.mesh.device)
        return Buffer(data, self.options.tracker.allocate(kind, data.nbytes))

    # -- contributions

    def open(self) -> None:
        """Allocate the unsharded buffer.

        Each parameter's first contribution overwrites its window, so only gaps and frozen parameters are zeroed: norm
        and update read them.
        """
        assert self.unsharded is None, f"the gradients of {self.unit.name} are already open"
        self.unsharded = self._buffer(self._unsharded_kind, self.unit.numel, self._persistent[0])
        if self.options.config.zero.poison_buffers:
            self.unsharded.data.fill_(torch.nan)
        frozen = [member.window for member in self.unit.members if not member.weight.trains]
        for gap in self.unit.layout.gaps + frozen:
            self.unsharded.data[gap.slice()] = 0

    def accumulate(self, weight: Weight, write: GradWriter) -> None:
        """Call `write`(window, add) on the weight's window of the unsharded buffer; the first call overwrites."""
        window = self._windows.get(weight)
        add = window is not None or self._complete
        if window is None:
            assert self.unsharded is not None, f"the gradients of {self.unit.name} are not open"
            window = self.unsharded.data[self._ranges[weight]].view(weight.block.stored)
            self._windows[weight] = window
        write(window, add)

    # -- reduction

    def start_reduce(self, reducer: Reducer) -> Pending:
        """Sum over the ranks that share a copy, then free the unsharded buffer.

        Raises:
            RuntimeError: naming the trainable parameters without a gradient.
        """
        members = self.unit.members
        missing = [
            member.weight.spec.name for member in members if member.weight.trains and member.weight not in self._windows
        ]
        if missing and not self._complete:
            raise RuntimeError(
                f"{', '.join(missing)} received no gradient; if the loss does not use them, pass --freeze-parameters"
            )
        assert self.unsharded is not None, self.unit.name
        unsharded, self.unsharded, self._windows, self._complete = self.unsharded, None, {}, False
        if not self.unit.policy.optimizer:
            self.reduced = unsharded
            return self.unit.shard.start_all_reduce(unsharded.data)
        add = self.reduced is not None
        if self.reduced is None:
            self.reduced = self._buffer("gradients", self.unit.owned.numel, self._persistent[1])
        reducer.start(unsharded, self.reduced.read(), add, self.unit)
        return Pending(then=reducer.drain)

    @property
    def sharded_grad(self) -> torch.Tensor:
        """The reduced gradient of the owned range, [owned], on the device or in host memory."""
        assert self.reduced is not None, f"the gradients of {self.unit.name} are not reduced"
        return self.reduced.read()

    def start_reduce_replicas(self) -> Pending:
        return self.unit.replica.start_all_reduce(self.sharded_grad)

    def start_sum_replicated(self) -> Pending:
        """Sum over tp the gradients of tp-replicated parameters (with sequence parallelism)."""
        summed = self.unit.group.summed(self.unit.layout, self.options.config.parallel.sequence_parallel)
        parts = [self.sharded_grad[part.slice()] for part in self.unit.owned_in(summed)]
        return in_one_group([self.mesh.tp.start_all_reduce(part) for part in parts])

    def start_sum_tied(self) -> Pending:
        """Sum over the first and the last pipeline stage, which both hold this unit."""
        return self.mesh.embedding.start_all_reduce(self.sharded_grad)

    # -- to the home of the states and back

    def start_store(self) -> Pending:
        """Copy the reduced gradient to the unit's home, and free it on the device."""
        assert isinstance(self.reduced, Buffer), f"the gradients of {self.unit.name} are not on the device"
        self.reduced, pending = self.home.start_store(self.reduced, self.pieces)
        return pending

    def start_fetch(self) -> Pending:
        """Copy the gradient of earlier micro-batches to the device.

        `start_reduce` adds to it. If it is not sharded, it is the unsharded buffer, and contributions add to it.
        """
        buffer = self._buffer("gradients", self.unit.owned.numel, None)
        if self.unit.policy.optimizer:
            self.reduced = buffer
        else:
            self.reduced, self.unsharded, self._complete = None, buffer, True
        return self.home.start_fetch(buffer.data)

    # -- after the reduction

    def counted(self) -> Sequence[torch.Tensor | float]:
        """Return the pieces of the sharded gradient that this rank adds to the norm, or their norms: see `square_sums`.

        These are the gradients of tp-sharded parameters and, on the first rank of tp, of tp-replicated ones. Replicated
        gradients of experts count on the first rank only.
        """
        assert self.reduced is not None, f"the gradients of {self.unit.name} are not reduced"
        return self.reduced.counted(self.pieces)

    def pieces(self, gradient: torch.Tensor) -> list[torch.Tensor]:
        """Return the pieces of numbers [owned] that this rank counts: see `counted`."""
        if not self.unit.group.over_tp:
            equal = [self.unit.replica, *([] if self.unit.policy.optimizer else [self.unit.shard])]
            return [gradient] if all(axis.is_first for axis in equal) else []
        ranges = [Range(0, self.unit.numel)] if self.mesh.tp.is_first else self.unit.layout.sharded("tp")
        return [gradient[part.slice()] for part in self.unit.owned_in(ranges)]

    def take(self) -> Buffer:
        """Hand over the reduced gradient; the caller ends its allocation."""
        assert self.reduced is not None, f"the gradients of {self.unit.name} are not reduced"
        reduced, self.reduced = self.reduced, None
        return reduced.take()

    def discard(self) -> None:
        """Free all gradients."""
        for each in (self.unsharded, self.reduced):
            if each is not None:
                each.free()
        self.unsharded, self.reduced, self._windows, self._complete = None, None, {}, False
