"""Gradients of a unit: this rank's whole contribution, and the reduced gradient of its owned range."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megazero.comm.mesh.collectives import Pending, together
from megazero.model.layers.weight import GradWriter, Weight
from megazero.plan.layout.flat_layout import ALIGN, Range
from megazero.plan.layout.zero_policy import persistent_gradients
from megazero.zero.flat_unit import FlatUnit, ZeroOptions
from megazero.zero.host_buffer import HostBuffer
from megazero.zero.reduce_scatter import Buffer, Reducer


class UnitGradients:
    """Gradients of one unit, in --grad-dtype.

    unsharded  [numel]  from `open` to `start_reduce`
    sharded    [owned]  their sum over the ranks that share a copy, from `start_reduce` to the update or `start_store`
    host       [owned]  the same in host memory, from `start_store` to the update
    """

    def __init__(self, unit: FlatUnit, options: ZeroOptions, host: HostBuffer | None) -> None:
        """host: memory of a unit with states in host memory."""
        self.unit, self.options, self.mesh, self.host = unit, options, options.mesh, host
        self.stored = False  # in `host`
        self.unsharded: Buffer | None = None
        self.sharded: Buffer | None = None
        self.kept = persistent_gradients(unit.policy, options.contiguous, options.micro_batches, unit.on_host)
        self._persistent: tuple[torch.Tensor | None, torch.Tensor | None] = None, None  # see bind_persistent
        self._ranges = {member.weight: member.window.slice() for member in unit.members}
        self._windows: dict[Weight, torch.Tensor] = {}  # windows of `unsharded` that have a contribution
        self._complete = False  # every window has one, by `accumulate_all` or `start_fetch`

    # -- memory

    @property
    def persistent_numel(self) -> tuple[int, int]:
        """Elements of `unsharded` and `sharded` in the arena (--contiguous-checkpointing)."""
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
        if self.options.poison:
            self.unsharded.data.fill_(torch.nan)
        frozen = [member.window for member in self.unit.members if not member.trains]
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

    def accumulate_all(self, gradients: torch.Tensor) -> None:
        """Write or add a contribution [numel] to all weights at once, in the unit's layout."""
        assert self.unsharded is not None, f"the gradients of {self.unit.name} are not open"
        assert not self._windows, "some weights have a contribution of their own"
        if self._complete:
            self.unsharded.data.add_(gradients)
        else:
            self.unsharded.data.copy_(gradients)
        self._complete = True

    # -- reduction

    def start_reduce(self, reducer: Reducer) -> Pending:
        """Sum over the ranks that share a copy, then free the unsharded buffer.

        Raises:
            RuntimeError: naming the trainable parameters without a gradient.
        """
        members = self.unit.members
        missing = [member.spec.name for member in members if member.trains and member.weight not in self._windows]
        if missing and not self._complete:
            raise RuntimeError(
                f"{', '.join(missing)} received no gradient; if the loss does not use them, pass --freeze-parameters"
            )
        assert self.unsharded is not None, self.unit.name
        unsharded, self.unsharded, self._windows, self._complete = self.unsharded, None, {}, False
        if not self.unit.policy.optimizer:
            self.sharded = unsharded
            return self.unit.shard.start_all_reduce(unsharded.data)
        add = self.sharded is not None
        if self.sharded is None:
            self.sharded = self._buffer("gradients", self.unit.owned.numel, self._persistent[1])
        reducer.start(unsharded, self.sharded.data, add, self.unit)
        return Pending(then=reducer.drain)

    @property
    def sharded_grad(self) -> torch.Tensor:
        """The reduced gradient of the owned range, [owned], on the device or in host memory."""
        if self.stored:
            assert self.host is not None
            return self.host.stored()
        assert self.sharded is not None, f"the gradients of {self.unit.name} are not reduced"
        return self.sharded.data

    def start_reduce_replicas(self) -> Pending:
        """Sum over the replicas of the sharding group."""
        return self.unit.replica.start_all_reduce(self.sharded_grad)

    def start_sum_replicated(self) -> Pending:
        """Sum over tp the gradients of tp-replicated parameters (with sequence parallelism)."""
        summed = self.unit.group.summed(self.unit.layout, self.options.sequence_parallel)
        parts = [self.sharded_grad[part.slice()] for part in self.unit.owned_in(summed)]
        return together([self.mesh.tp.start_all_reduce(part) for part in parts])

    def start_sum_tied(self) -> Pending:
        """Sum over the first and the last pipeline stage, which both hold this unit."""
        return self.mesh.embedding.start_all_reduce(self.sharded_grad)

    # -- to host memory and back

    def start_store(self) -> Pending:
        """Copy the reduced gradient to host memory, and free it on the device."""
        assert self.host is not None and self.sharded is not None, self.unit.name
        (data, allocation), self.sharded, self.stored = self.sharded, None, True
        copy = self.host.start_store(data, lambda stored: [norm(part).item() for part in self._counted(stored)])

        def stored() -> None:
            copy.wait()
            allocation.end()

        return Pending(held=(data,), then=stored)

    def start_fetch(self) -> Pending:
        """Copy the gradient of earlier micro-batches to the device.

        `start_reduce` adds to it. If it is not sharded, it is the unsharded buffer, and contributions add to it.
        """
        assert self.host is not None and self.stored, self.unit.name
        buffer, self.stored = self._buffer("gradients", self.unit.owned.numel, None), False
        if self.unit.policy.optimizer:
            self.sharded = buffer
        else:
            self.unsharded, self._complete = buffer, True
        return self.host.start_fetch(buffer.data)

    # -- after the reduction

    def counted(self) -> Sequence[torch.Tensor | float]:
        """Return the pieces of the sharded gradient that this rank adds to the norm, or their norms: see `square_sums`.

        These are the gradients of tp-sharded parameters and, on the first rank of tp, of tp-replicated ones. Of equal
        gradients of experts the first rank adds its own.
        """
        norms = self.host.known_norms() if self.host is not None and self.stored else None
        return self._counted(self.sharded_grad) if norms is None else norms

    def _counted(self, gradient: torch.Tensor) -> list[torch.Tensor]:
        if not self.unit.group.over_tp:
            equal = [self.unit.replica, *([] if self.unit.policy.optimizer else [self.unit.shard])]
            return [gradient] if all(axis.is_first for axis in equal) else []
        ranges = [Range(0, self.unit.numel)] if self.mesh.tp.is_first else self.unit.layout.sharded("tp")
        return [gradient[part.slice()] for part in self.unit.owned_in(ranges)]

    def first_nonfinite(self) -> str | None:
        """Return the name of the first parameter whose reduced gradient, in the owned range, is not finite."""
        for part in self.unit.owned_parts():
            reduced = self.stored or self.sharded is not None
            if reduced and not self.sharded_grad[part.owned.slice()].isfinite().all():
                return part.spec.name
        return None

    def take(self) -> Buffer:
        """Hand over the reduced gradient; the caller ends its allocation."""
        if self.stored:
            assert self.host is not None
            self.stored = False
            return Buffer(self.host.gradient, self.options.tracker.allocate("host", 0))  # tracked by its HostBuffer
        assert self.sharded is not None, self.unit.name
        sharded, self.sharded = self.sharded, None
        return sharded

    def discard(self) -> None:
        """Free all gradients."""
        for buffer in (self.unsharded, self.sharded):
            if buffer is not None:
                buffer.allocation.end()
        self.unsharded, self.sharded, self._windows, self._complete = None, None, {}, False
        self.stored = False


def norm(values: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the norm of numbers [n], in fp64, where they are. ALIGN divides n.

    Note [norms in fp32]: torch's vector_norm of 4 M fp32 numbers on a CPU has an error of 1e-4, because it
    accumulates sequentially in fp32. Rows of ALIGN elements in fp32, and their sum in fp64, have an error of 1e-10 at
    the same cost, and are the same rows in every layout. torch's `_foreach_norm` has no rows.
    """
    dtype = torch.promote_types(values.dtype, torch.float32)
    rows = torch.linalg.vector_norm(values.view(-1, ALIGN), dim=1, dtype=dtype)
    found: torch.Tensor = torch.linalg.vector_norm(rows, dtype=torch.float64, out=out)
    return found


def square_sums(groups: Sequence[Sequence[torch.Tensor | float]], device: torch.device) -> torch.Tensor:
    """Return the sum of squares of each group's pieces, in fp64 on the device: [groups].

    Pieces are on the device or in host memory, or are norms, which the host knows.
    """
    pieces = [piece for group in groups for piece in group]
    norms = {
        place: torch.zeros(len(pieces), dtype=torch.float64, device=place)
        for place in {device, *(_place(piece) for piece in pieces)}
    }
    for number, piece in enumerate(pieces):
        if isinstance(piece, torch.Tensor):
            norm(piece, out=norms[_place(piece)][number])
        else:
            norms[_place(piece)][number] = piece
    total = norms.pop(device)
    for others in norms.values():  # which have 0 for the pieces of this one
        total += others.to(device)
    return torch.stack([part.sum() for part in total.square_().split([len(group) for group in groups])])


def _place(piece: torch.Tensor | float) -> torch.device:
    return piece.device if isinstance(piece, torch.Tensor) else torch.device("cpu")
