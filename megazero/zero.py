"""ZeRO-DP: one mechanism; the stage only chooses which of three things are cut over the data-parallel ranks.

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
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from megazero.flat import ALIGN, FlatLayout, Range
from megazero.ledger import Lease, Ledger
from megazero.mesh import Mesh
from megazero.optim import Update, adamw_
from megazero.parameters import LocalBlock, ParamSpec, unit_layout
from megazero.policy import Use, ZeroPolicy, ring_slots
from megazero.tensor_parallel import Write

Initial = Callable[[ParamSpec, LocalBlock, torch.Tensor], None]


class Ring:
    """Fixed slots for gathered weights, a few for every size of unit (see `ring_slots`)."""

    def __init__(self, sizes: list[int], dtype: torch.dtype, device: torch.device, poison: bool) -> None:
        self.poison = poison
        self.free: dict[int, list[torch.Tensor]] = {}
        for size, slots in ring_slots(sizes).items():
            self.free[size] = [torch.full((size,), torch.nan, dtype=dtype, device=device) for _ in range(slots)]

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
    state: dict[str, torch.Tensor]  # master, exp_avg, exp_avg_sq: [stop - start] in fp32


class Buffer(NamedTuple):
    """A tensor and its entry in the ledger."""

    data: torch.Tensor
    lease: Lease


class ParamUnit:
    """The parameters that are gathered, reduced and updated together.

    own      [owned]  compute dtype: this rank's range. With whole parameters it is a window of `whole`.
    whole    [numel]  compute dtype: all the weights; kept, or a slot of the ring while in use.
    master   [owned]  fp32: what the optimizer updates. In an fp32 run it *is* `own`.
    moments  2 x [owned]  fp32
    full     [numel]  grad dtype: gradients, from the first contribution to reduce()
    reduced  [owned]  grad dtype: their sum over dp, from reduce() to update()
    """

    def __init__(
        self, name: str, specs: list[ParamSpec], parameters: list[nn.Parameter], zero: Zero, initial: Initial
    ) -> None:
        mesh = zero.mesh
        self.name, self.dp, self.policy, self.ledger = name, mesh.dp, zero.policy, zero.ledger
        self.grad_dtype, self.poison, self.device = zero.grad_dtype, zero.poison, mesh.device
        self.specs = specs
        self.blocks = [spec.local(mesh.tp.size, mesh.tp.rank) for spec in specs]
        self.flat: FlatLayout = unit_layout(specs, mesh.tp.size, mesh.dp.size)
        self.windows = {p: self.flat.windows[s.name] for p, s in zip(parameters, specs, strict=True)}
        self.owned = self.flat.owned(mesh.dp.rank, mesh.dp.size) if self.policy.optimizer else Range(0, self.flat.numel)
        self.users, self.expected, self.arrived = 0, 0, 0
        self.full: Buffer | None = None
        self.reduced: Buffer | None = None
        self.fresh: set[nn.Parameter] = set()  # no contribution to `full` yet
        self._allocate(zero.dtype, initial)

    def _allocate(self, dtype: torch.dtype, initial: Initial) -> None:
        """Draw the unit's weights, and keep of them what this rank keeps: never more than one unit at a time."""
        drawn = torch.zeros(self.flat.numel)
        for spec, block in zip(self.specs, self.blocks, strict=True):
            start = self.flat.windows[spec.name].start
            initial(spec, block, drawn[start : start + block.numel].view(block.shape))
        owned = drawn[self.owned.slice()]
        self.whole: torch.Tensor | None = None
        if self.policy.parameters:
            self.own = owned.to(self.device, dtype, copy=True)
        else:
            self.whole = drawn.to(self.device, dtype)
            self.own = self.whole[self.owned.slice()]
        in_place = dtype == torch.float32
        self.master = self.own if in_place else owned.to(self.device, copy=True)
        self.moments = torch.zeros_like(self.master), torch.zeros_like(self.master)
        kept = self.own if self.whole is None else self.whole
        self.at_rest = [
            self.ledger.lease("parameters", kept.numel() * kept.element_size()),
            self.ledger.lease("optimizer", (8 if in_place else 12) * self.owned.numel),
        ]
        self.released = torch.full((), torch.nan, dtype=dtype, device=self.device)
        self._point()

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

    def gather(self, ring: Ring) -> None:
        self.users += 1
        if self.policy.parameters and self.users == 1:
            self.whole = self.dp.all_gather(self.own, ring.take(self.flat.numel))
            self._point()

    def release(self, ring: Ring) -> None:
        self.users -= 1
        assert self.users >= 0, self.name
        if self.policy.parameters and self.users == 0:
            assert self.whole is not None
            slot, self.whole = self.whole, None
            self._point()
            ring.give(slot)

    # -- gradients: counted, and blind to the weights

    def contribute(self, parameter: nn.Parameter, write: Write) -> bool:
        """Let `write` write or add to the parameter's window. True when all that a micro-batch owes has arrived."""
        if self.full is None:
            self.full = self._fresh_gradients()
            self.fresh = set(self.windows)
        window = self.full.data[self.windows[parameter].slice()].view(parameter.shape)
        write(window, parameter not in self.fresh)
        self.fresh.discard(parameter)
        self.arrived = (self.arrived + 1) % self.expected
        return self.arrived == 0

    def _fresh_gradients(self) -> Buffer:
        """Not zeroed: the first contribution writes. Gaps are, for they enter the norm and the update."""
        full = torch.empty(self.flat.numel, dtype=self.grad_dtype, device=self.device)
        if self.poison:
            full.fill_(torch.nan)
        for gap in self.flat.gaps:
            full[gap.slice()] = 0
        kind = "buffers" if self.policy.optimizer else "gradients"
        return Buffer(full, self.ledger.lease(kind, full.numel() * full.element_size()))

    def reduce(self) -> None:
        """Sum over dp into `reduced`; the full gradients go away."""
        assert self.full is not None and not self.fresh, f"{self.name}: {len(self.fresh)} without a gradient"
        full, self.full = self.full, None
        if not self.policy.optimizer:
            self.dp.all_reduce_(full.data)
            self.reduced = full
            return
        add = self.reduced is not None
        if self.reduced is None:
            data = full.data.new_empty(self.owned.numel)
            lease = self.ledger.lease("gradients", data.numel() * data.element_size())
            self.reduced = Buffer(data, lease)
        staging = self.ledger.lease("buffers", full.lease.num_bytes if self.dp.staged else 0)
        self.dp.reduce_scatter(full.data, self.reduced.data, add)
        staging.end()
        full.lease.end()

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

    def update(self, update: Update) -> None:
        """AdamW on the owned range, then publish. Gradients in fp32 exist for this unit alone."""
        assert self.reduced is not None
        reduced, self.reduced = self.reduced, None
        gradient, wide = reduced.data, reduced.data.dtype == torch.float32
        lease = self.ledger.lease("buffers", 0 if wide else 4 * self.owned.numel)
        if not wide:
            gradient = gradient.float()
        if update.factor != 1.0:
            gradient.mul_(update.factor)
        adamw_(update, self.master, gradient, self.moments, self.flat.decayed.within(self.owned).numel)
        lease.end()
        reduced.lease.end()
        self.publish()

    def publish(self) -> None:
        """Master weights -> compute weights, everywhere that they are kept."""
        if self.master is not self.own:
            self.own.copy_(self.master)
        if self.policy.optimizer and not self.policy.parameters:
            assert self.whole is not None
            self.dp.all_gather(self.own, self.whole)  # in place: `own` is this rank's window

    def owned_parts(self) -> Iterator[OwnedPart]:
        """Every parameter's part in the owned range; gaps and padding are left out. Possibly empty parts too."""
        for spec, block in zip(self.specs, self.blocks, strict=True):
            start = self.flat.windows[spec.name].start
            true = Range(start, start + block.numel)
            mine = true.within(self.owned)
            first = mine.start + self.owned.start - true.start if mine.numel else 0
            tensors = {"master": self.master, "exp_avg": self.moments[0], "exp_avg_sq": self.moments[1]}
            state = {name: t[mine.slice()] for name, t in tensors.items()}
            yield OwnedPart(spec, block, first, first + mine.numel, state)


def square_sum(values: torch.Tensor) -> torch.Tensor:
    """Of [n] values, n a multiple of ALIGN, as all ranges of a flat buffer are; a scalar in fp64.

    Note [norms in fp32]: torch's vector_norm of 4 M fp32 numbers on a CPU is off by 1e-4, for it adds them up one by
    one in fp32. Rows of ALIGN elements in fp32, and their sum in fp64, are off by 1e-10, cost the same, and give every
    layout the same rows.
    """
    rows = torch.linalg.vector_norm(values.view(-1, ALIGN), dim=1, dtype=torch.float32)
    return rows.square_().sum(dtype=torch.float64)


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
    """Before a layer: its input gradient is done, its weights are not needed again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, end: Callable[[], None]) -> torch.Tensor:
        ctx.end = end
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> Any:
        ctx.end()
        return dx, None


class Zero:
    """Owns every parameter of a pipeline stage, its gradients and its optimizer states.

    `contribute` goes into the layers' constructor, `adopt` gives the parameters memory, `run` calls the layers.
    """

    def __init__(
        self,
        policy: ZeroPolicy,
        mesh: Mesh,
        ledger: Ledger,
        *,
        dtype: torch.dtype = torch.float32,
        grad_dtype: torch.dtype = torch.float32,
        poison: bool = False,
    ) -> None:
        self.policy, self.mesh, self.ledger = policy, mesh, ledger
        self.dtype, self.grad_dtype, self.poison = dtype, grad_dtype, poison
        self.final = False  # no later micro-batch adds gradients
        self.units: dict[str, ParamUnit] = {}
        self.unit_of: dict[nn.Parameter, ParamUnit] = {}
        self.uses: dict[nn.Module, tuple[Use, list[ParamUnit]]] = {}

    def adopt(
        self,
        units: Mapping[str, list[tuple[ParamSpec, nn.Parameter]]],
        uses: Mapping[nn.Module, tuple[Use, list[str]]],
        initial: Initial,
    ) -> None:
        """Give every parameter its memory.

        Args:
            units: unit name -> its parameters.
            uses: layer -> how it uses which units; each use owes each of their parameters one gradient a micro-batch.
            initial: writes a parameter's initial values.
        """
        for name, members in units.items():
            specs, parameters = [s for s, _ in members], [p for _, p in members]
            self.units[name] = ParamUnit(name, specs, parameters, self, initial)
        self.unit_of = {p: u for u in self.units.values() for p in u.windows}
        self.uses = {layer: (use, [self.units[n] for n in names]) for layer, (use, names) in uses.items()}
        for _, used in self.uses.values():
            for unit in used:
                unit.expected += len(unit.windows)
        sizes = [u.flat.numel for u in self.units.values()] if self.policy.parameters else []
        self.ring = Ring(sizes, self.dtype, self.mesh.device, self.poison)
        slots = sum(size * count for size, count in ring_slots(sizes).items())
        self.at_rest = self.ledger.lease("buffers", slots * self.dtype.itemsize)

    def _gather(self, units: list[ParamUnit]) -> None:
        for unit in units:
            unit.gather(self.ring)

    def _release(self, units: list[ParamUnit]) -> None:
        for unit in units:
            unit.release(self.ring)

    def run(self, layer: nn.Module, *args: Any) -> torch.Tensor:
        """layer(*args) with its weights present, and again while its backward runs."""
        use, units = self.uses[layer]
        kept, in_backward = use.value if torch.is_grad_enabled() else (False, False)
        self._gather(units)
        try:
            if not in_backward:
                return layer(*args)
            x, *rest = args
            y = layer(_Closes.apply(x, lambda: self._release(units)), *rest)
            return _Opens.apply(y, lambda: None if kept else self._gather(units))
        finally:  # checkpoint leaves a recompute early, by an exception
            if not kept:
                self._release(units)  # a recompute runs inside an open backward, which is a user too

    def contribute(self, parameter: nn.Parameter, write: Write) -> None:
        """Take a parameter's gradient; reduce its unit when it is due."""
        unit = self.unit_of[parameter]
        if unit.contribute(parameter, write) and (self.policy.gradients or self.final):
            unit.reduce()

    @contextmanager
    def backward(self, final: bool) -> Iterator[None]:
        """Around a micro-batch's backward; `final`: the last of this iteration."""
        self.final = final
        yield
        self.final = False

    def sum_gradients(self, tied: str | None) -> None:
        """After the last backward: everything is reduced; sum the tied unit, if any, over both pipeline ends."""
        for unit in self.units.values():
            assert unit.reduced is not None and unit.full is None, f"{unit.name}: not reduced"
            assert unit.users == 0, f"{unit.name}: still has {unit.users} users"
        if tied is not None and tied in self.units:
            reduced = self.units[tied].reduced
            assert reduced is not None
            self.mesh.ends.all_reduce_(reduced.data)

    def gradient_norm(self, tied: str | None) -> float:
        """Global L2 norm; what is cut, replicated or tied is counted once."""
        mesh = self.mesh
        total = torch.zeros((), dtype=torch.float64, device=mesh.device)
        for unit in self.units.values():
            if unit.name != tied or mesh.pp.is_first:
                total += unit.square_sum(replicated=mesh.tp.is_first)
        axes = [mesh.tp, mesh.pp] + [mesh.dp] * self.policy.optimizer
        return float(mesh.control_sum(total, *axes).sqrt())

    def update(self, update: Update) -> None:
        """Unit by unit: cast, AdamW, publish."""
        for unit in self.units.values():
            unit.update(update)

    def discard_gradients(self) -> None:
        """Skip an update."""
        for unit in self.units.values():
            assert unit.reduced is not None
            unit.reduced.lease.end()
            unit.reduced = None
