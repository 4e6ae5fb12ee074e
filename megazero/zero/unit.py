"""The parameters that are gathered, reduced and updated together: a unit, and the slots that gathered units lie in.

See the table at the top of `zero.py` for what the stages make of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn

from megazero.comm.collectives import Pending
from megazero.comm.mesh import Mesh
from megazero.memory.tracker import Ledger
from megazero.model.context import Write
from megazero.plan.flat_layout import ALIGN, FlatLayout, Range
from megazero.plan.parameters import LocalBlock, ParamSpec, unit_layout
from megazero.plan.zero_policy import NOTHING_FIXED, FixedGradients, ZeroPolicy, ring_slots
from megazero.zero.adamw import Update, adamw_
from megazero.zero.reduce_scatter import Buffer, Reducer

# (parameter, its local block, start, stop) -> initial values of elements [start, stop) of the block, fp32
Initial = Callable[[ParamSpec, LocalBlock, int, int], torch.Tensor]


@dataclass(frozen=True)
class ZeroOptions:
    """What all units of a rank share."""

    policy: ZeroPolicy
    mesh: Mesh
    ledger: Ledger
    dtype: torch.dtype = torch.float32
    grad_dtype: torch.dtype = torch.float32
    bucket_size: int = 40_000_000  # elements
    overlap: bool = True
    fixed: FixedGradients = NOTHING_FIXED
    sequence_parallel: bool = False
    poison: bool = False  # fill what must not be read with NaN


class Ring:
    """Fixed slots for gathered weights, a few for every size of unit (see `ring_slots`)."""

    def __init__(self, sizes: list[int], options: ZeroOptions) -> None:
        self.poison = options.poison
        self.free: dict[int, list[torch.Tensor]] = {}
        for size, slots in ring_slots(sizes, options.policy).items():
            self.free[size] = [
                torch.full((size,), torch.nan, dtype=options.dtype, device=options.mesh.device) for _ in range(slots)
            ]
        self.num_bytes = sum(slot.nbytes for slots in self.free.values() for slot in slots)

    def has(self, numel: int) -> bool:
        return bool(self.free[numel])

    def take(self, numel: int) -> torch.Tensor:
        """The slot that has been free longest: a weight seldom returns to the one that it left."""
        assert self.free[numel], f"no slot is free for a unit of {numel} elements"
        return self.free[numel].pop(0)

    def give(self, slot: torch.Tensor) -> None:
        self.free[slot.numel()].append(slot.fill_(torch.nan) if self.poison else slot)


class OwnedPart(NamedTuple):
    """What this rank owns of a parameter: the flat range [start, stop) of its local block, and the state there."""

    spec: ParamSpec
    block: LocalBlock
    start: int
    stop: int
    owned: Range  # the same range, within what the rank owns of the unit


class ParamUnit:
    """Weights, gradients and optimizer states of one unit, on one rank.

    own      [owned]  compute dtype: this rank's range. With whole parameters it is a window of `whole`.
    whole    [numel]  compute dtype: all the weights; kept, or a slot of the ring while in use.
    master   [owned]  fp32: what the optimizer updates. In an fp32 or fp64 run it *is* `own`.
    moments  2 x [owned]  as master
    full     [numel]  grad dtype: gradients, from the first contribution to reduce()
    reduced  [owned]  grad dtype: their sum over the ranks that share a copy, from reduce() to update()
    """

    def __init__(
        self,
        name: str,
        members: list[tuple[ParamSpec, nn.Parameter]],
        options: ZeroOptions,
        initial: Initial,
    ) -> None:
        mesh = options.mesh
        self.name, self.options, self.policy, self.ledger = name, options, options.policy, options.ledger
        self.shard, self.replica, self.device = mesh.shard, mesh.replica, mesh.device
        self.specs = [spec for spec, _ in members]
        self.blocks = [spec.local(mesh.tp.size, mesh.tp.rank) for spec in self.specs]
        self.flat: FlatLayout = unit_layout(self.specs, mesh.tp.size, self.shard.size)
        self.windows = {p: self.flat.windows[spec.name] for spec, p in members}
        self.names = {p: spec.name for spec, p in members}
        self.trainable = {p for _, p in members if p.requires_grad}
        whole = Range(0, self.flat.numel)
        self.owned = self.flat.owned(self.shard.rank, self.shard.size) if self.policy.optimizer else whole
        self.users, self.expected, self.arrived = 0, 0, 0
        self.held = False  # gathered until the end of the iteration
        self.full: Buffer | None = None
        self.reduced: Buffer | None = None
        self.full_home: torch.Tensor | None = None  # where `full` lies in an arena, if it does: see `settle`
        self.reduced_home: torch.Tensor | None = None
        self.fresh: set[nn.Parameter] = set()  # no contribution to `full` yet
        self.arriving = Pending()  # weights on their way into `whole`
        self.reducing = Pending()  # an all-reduce of `reduced`
        self._allocate(initial)

    def _allocate(self, initial: Initial) -> None:
        """Draw what this rank owns, and get the rest, where it keeps that, from the others: never a whole model."""
        dtype = self.options.dtype
        self.whole: torch.Tensor | None = None
        if not self.policy.parameters:
            self.whole = torch.zeros(self.flat.numel, dtype=dtype, device=self.device)
            self.own = self.whole[self.owned.slice()]
        else:
            self.own = torch.zeros(self.owned.numel, dtype=dtype, device=self.device)
        in_place = dtype in (torch.float32, torch.float64)
        self.master = self.own if in_place else torch.zeros(self.owned.numel, device=self.device)
        self.moments = torch.zeros_like(self.master), torch.zeros_like(self.master)
        for part in self.owned_parts():
            self.master[part.owned.slice()] = initial(part.spec, part.block, part.start, part.stop).to(self.device)
        kept = self.own if self.whole is None else self.whole
        self.at_rest = [
            self.ledger.lease("parameters", kept.nbytes),
            self.ledger.lease("optimizer", (2 if in_place else 3) * self.master.nbytes),
        ]
        self.released = torch.full((), torch.nan, dtype=dtype, device=self.device)
        self._point()
        self.publish()

    def _point(self) -> None:
        """Point every parameter into `whole`, or at one NaN seen under its shape.

        Setting `.data` leaves autograd's version counters alone; views of a refilled buffer would fail in backward.
        """
        for (p, window), block in zip(self.windows.items(), self.blocks, strict=True):
            if self.whole is None:
                p.data = self.released.expand(block.stored)
            else:
                p.data = self.whole[window.slice()].view(block.stored)

    # -- weights: present while somebody uses them

    def prefetch(self, ring: Ring) -> None:
        """Begin to gather, if there is room: somebody is about to."""
        if self.policy.parameters and self.whole is None and ring.has(self.flat.numel):
            self._start_gather(ring)

    def _start_gather(self, ring: Ring) -> None:
        self.whole = ring.take(self.flat.numel)
        self.arriving = self.shard.start_all_gather(self.own, self.whole)

    def gather(self, ring: Ring) -> None:
        """One user more: the weights are there when this returns."""
        self.users += 1
        if self.whole is None:
            self._start_gather(ring)
        self.wait()
        if self.policy.parameters and self.users == 1:
            self._point()

    def release(self, ring: Ring) -> None:
        """One user less; the last one lets the weights go, unless they are kept."""
        self.users -= 1
        assert self.users >= 0, self.name
        if self.policy.parameters and self.users == 0:
            assert self.whole is not None
            slot, self.whole = self.whole, None
            self._point()
            ring.give(slot)

    def wait(self) -> None:
        """For weights on their way."""
        self.arriving.wait()

    # -- gradients: counted, and blind to the weights

    def contribute(self, parameter: nn.Parameter, write: Write) -> bool:
        """Let `write` write or add to the parameter's window. True when all that a micro-batch owes has arrived."""
        if self.full is None:
            self.full = self._fresh_gradients()
            self.fresh = set(self.trainable)
        window = self.full.data[self.windows[parameter].slice()].view(parameter.shape)
        write(window, parameter not in self.fresh)
        self.fresh.discard(parameter)
        self.arrived = (self.arrived + 1) % self.expected
        return self.arrived == 0

    @property
    def fixed_numel(self) -> tuple[int, int]:
        """Elements of `full` and of `reduced` that lie in an arena."""
        fixed, trains = self.options.fixed, bool(self.trainable)
        return self.flat.numel * (fixed.full and trains), self.owned.numel * (fixed.reduced and trains)

    def settle(self, full: torch.Tensor, reduced: torch.Tensor) -> None:
        """Give gradients their places in an arena, `fixed_numel` elements each, for good."""
        self.full_home = full if full.numel() else None
        self.reduced_home = reduced if reduced.numel() else None
        self.at_rest.append(self.ledger.lease(self._full_kind, full.nbytes))
        self.at_rest.append(self.ledger.lease("gradients", reduced.nbytes))

    @property
    def _full_kind(self) -> str:
        return "buffers" if self.policy.optimizer else "gradients"

    def _buffer(self, kind: str, numel: int, home: torch.Tensor | None) -> Buffer:
        if home is not None:
            return Buffer(home, self.ledger.lease(kind, 0))  # entered when it settled
        data = torch.empty(numel, dtype=self.options.grad_dtype, device=self.device)
        return Buffer(data, self.ledger.lease(kind, data.nbytes))

    def _fresh_gradients(self) -> Buffer:
        """Not zeroed: the first contribution writes. Gaps and frozen parameters are, for they enter norm and update."""
        full = self._buffer(self._full_kind, self.flat.numel, self.full_home)
        if self.options.poison:
            full.data.fill_(torch.nan)
        frozen = [window for p, window in self.windows.items() if p not in self.trainable]
        for gap in self.flat.gaps + frozen:
            full.data[gap.slice()] = 0
        return full

    def reduce(self, reducer: Reducer) -> None:
        """Begin to sum over the ranks that share a copy; the full gradients go away."""
        self.require_gradients()
        assert self.full is not None
        full, self.full = self.full, None
        if not self.policy.optimizer:
            self.reduced = full
            self.reducing = self.shard.start_all_reduce(full.data)
            if not self.options.overlap:
                self.reducing.wait()
            return
        add = self.reduced is not None
        if self.reduced is None:
            self.reduced = self._buffer("gradients", self.owned.numel, self.reduced_home)
        reducer.start(full, self.reduced.data, add)

    def require_gradients(self) -> None:
        """RuntimeError, naming the trainable parameters of which no gradient has come."""
        none = self.reduced is None and self.full is None
        missing = [name for p, name in self.names.items() if p in (self.trainable if none else self.fresh)]
        if missing:
            raise RuntimeError(
                f"no gradient came for {', '.join(missing)}; --freeze-parameters what the loss does not use"
            )

    def reduce_replicas(self) -> None:
        """Begin to sum over the replicas, once an iteration, when the shard's sum is there."""
        self.reducing.wait()
        if self.reduced is not None:
            self.reducing = self.replica.start_all_reduce(self.reduced.data)

    def sum_replicated(self) -> None:
        """Sequence parallelism: begin to sum over tp the gradients of what is replicated there.

        A rank's are those of its own tokens. Once an iteration, on the owned range.
        """
        part = self.flat.replicated.within(self.owned)
        self.reducing.wait()
        if self.options.sequence_parallel and self.reduced is not None and part.numel:
            self.reducing = self.options.mesh.tp.start_all_reduce(self.reduced.data[part.slice()])

    # -- the update

    def square_sum(self, replicated: bool) -> torch.Tensor:
        """Of the reduced gradient: of what is cut over tp, and, if asked for, of what is replicated. fp64 scalar."""
        assert self.reduced is not None
        shared = self.flat.replicated
        ranges = [Range(0, shared.start), Range(shared.stop, self.flat.numel)] + [shared] * replicated
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for part in ranges:
            total += square_sum(self.reduced.data[part.within(self.owned).slice()])
        return total

    def first_nonfinite(self) -> str | None:
        """The first parameter whose reduced gradient, in the owned range, holds an infinity or a NaN."""
        for part in self.owned_parts():
            if self.reduced is not None and not self.reduced.data[part.owned.slice()].isfinite().all():
                return part.spec.name
        return None

    def update(self, update: Update) -> None:
        """AdamW on the owned range, then publish. Gradients in the master's type exist for this unit alone."""
        assert self.reduced is not None
        self.wait()  # nobody may have used what the last update published
        reduced, self.reduced = self.reduced, None
        gradient, wide = reduced.data, reduced.data.dtype == self.master.dtype
        lease = self.ledger.lease("buffers", 0 if wide else self.master.nbytes)
        if not wide:
            gradient = gradient.to(self.master.dtype)
        if update.factor != 1.0:
            gradient.mul_(update.factor)
        adamw_(update, self.master, gradient, self.moments, self.flat.decayed.within(self.owned).numel)
        lease.end()
        reduced.lease.end()
        self.publish()

    def discard(self) -> None:
        """Forget all gradients."""
        for buffer in (self.full, self.reduced):
            if buffer is not None:
                buffer.lease.end()
        self.full = self.reduced = None
        self.arrived = 0

    def publish(self) -> None:
        """Master weights -> compute weights, everywhere that they are kept. They arrive by the next use."""
        self.wait()
        self.options.mesh.in_flight.check(f"the update of {self.name}", writes=[self.own])
        if self.master is not self.own:
            self.own.copy_(self.master)
        if self.policy.optimizer and not self.policy.parameters:
            assert self.whole is not None
            self.arriving = self.shard.start_all_gather(self.own, self.whole)  # `own` is this rank's window
            if not self.options.overlap:
                self.wait()

    def owned_parts(self) -> Iterator[OwnedPart]:
        """Every parameter's part in the owned range; gaps and padding are left out. Possibly empty parts too."""
        for spec, block in zip(self.specs, self.blocks, strict=True):
            start = self.flat.windows[spec.name].start
            true = Range(start, start + block.numel)
            mine = true.within(self.owned)
            first = mine.start + self.owned.start - true.start if mine.numel else 0
            yield OwnedPart(spec, block, first, first + mine.numel, mine)

    def state(self, part: OwnedPart) -> dict[str, torch.Tensor]:
        """What is saved of a part: [stop - start] each, in fp32, or of an fp64 run in fp64."""
        tensors = {"master": self.master, "exp_avg": self.moments[0], "exp_avg_sq": self.moments[1]}
        return {name: t[part.owned.slice()] for name, t in tensors.items()}


def square_sum(values: torch.Tensor) -> torch.Tensor:
    """Of [n] values, n a multiple of ALIGN, as all ranges of a flat buffer are; a scalar in fp64.

    Note [norms in fp32]: torch's vector_norm of 4 M fp32 numbers on a CPU is off by 1e-4, for it adds them up one by
    one in fp32. Rows of ALIGN elements in fp32, and their sum in fp64, are off by 1e-10, cost the same, and give every
    layout the same rows.
    """
    rows = torch.linalg.vector_norm(
        values.view(-1, ALIGN), dim=1, dtype=torch.promote_types(values.dtype, torch.float32)
    )
    return rows.double().square_().sum()
