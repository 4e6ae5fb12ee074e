"""Optimizer states of a unit's owned range: master weights, and the states of the update rules."""

from typing import NamedTuple

import torch

from megazero.engine.kernels.noise import Noise, NoisePiece
from megazero.engine.mesh.collectives import Pending
from megazero.engine.model.layers.context import DTYPES
from megazero.engine.optim.muon import OwnedMatrices
from megazero.engine.optim.small import Kept, SplitMaster, Wide, carve, kept, round_away
from megazero.engine.optim.step import StepParams
from megazero.engine.optim.updates import MATRIX_UPDATES, UPDATES
from megazero.engine.options.optimizers import TOGETHER, UpdateRule
from megazero.engine.plan.layout.flat_layout import Range
from megazero.engine.zero.flat_unit import FlatUnit, ZeroOptions
from megazero.engine.zero.home import Buffer, Home

LOWER = 0xFFFF  # half of an int32


class RuledPart(NamedTuple):
    """A part of the owned range whose weights have the same rule.

    Attributes:
        owned: the part, counted from the start of the owned range.
        states: in the order of the rule's; [n] each, [0] in a run that does not train.
        average: running average of the master weights, [n]; None: it is not kept.
        matrices: of a rule of whole matrices.
        noise: bits for rounding, if states are small.
    """

    rule: UpdateRule
    owned: Range
    states: tuple[Kept, ...]
    average: Wide | None
    matrices: list[OwnedMatrices]
    noise: Noise | None

    @property
    def kept(self) -> tuple[Kept, ...]:
        """In the order of the rule's `kept`."""
        return self.states if self.average is None else (*self.states, self.average)

    def bits(self, part: Range, update: int) -> list[torch.Tensor]:
        """Return random bits for each state, of elements counted from the start of the owned range."""
        assert self.noise is not None
        both = self.noise.bits(self.within(part), update)
        halves = both >> 16 & LOWER, both & LOWER
        return [halves[number % 2] for number, _ in enumerate(self.states)]

    def within(self, part: Range) -> Range:
        return part.within(self.owned)


class OptimizerShard:
    """Master weights and states of one unit, in fp32 (fp64 with --precision fp64), on the device or in host memory.

    Attributes:
        master: [owned], updated by the optimizer. On the device, it is the tensor of the sharded weights if they have
            its dtype. A split master keeps its upper 16 bits in the sharded weights.
    """

    def __init__(
        self,
        unit: FlatUnit,
        weights: torch.Tensor,
        options: ZeroOptions,
        home: Home,
        memory: torch.Tensor | None = None,
    ) -> None:
        """Allocate zeros.

        Args:
            weights: the sharded weights, [owned].
            memory: zeros, uint8, tracked elsewhere, that hold all numbers; None: allocate them.
        """
        self.unit, self.options, self.weights, self.home = unit, options, weights, home
        self.dtype, self.device = options.master_dtype, home.device
        copies = not home.on_device or weights.dtype != self.dtype
        splits = options.optimizer.splits and home.on_device
        self._new = self._zeros if memory is None else carve(memory)
        self.master: Kept = SplitMaster(weights) if splits else Wide(weights)
        if copies and not splits:
            self.master = Wide(self._new(len(weights), self.dtype))
        self.parts = [self._part(rule, part) for rule, part in unit.layout.by_rule(unit.owned, options.optimizer)]
        self.temporary = unit.sizes(options).temporary
        held = self.master.nbytes * copies + sum(state.nbytes for part in self.parts for state in part.kept)
        if memory is None:
            self.allocation = options.tracker.allocate(home.kind, held)

    def _zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def initialize(self) -> None:
        """Draw the initial values of the owned range."""
        for owned in self.unit.owned_parts():
            self.master.write(owned.owned.slice(), owned.weight.initial(owned.start, owned.stop).to(self.device), None)
        self.cast()
        for part in self.parts:
            self.begin_average(part, part.owned)

    def _part(self, rule: UpdateRule, part: Range) -> RuledPart:
        numel, noise = part.numel if self.options.config.trains else 0, None
        states = tuple(kept(state, numel, self.dtype, self._new) for state in rule.states)
        averages = rule.averages and self.options.config.trains
        if rule.is_small:
            pieces = [
                NoisePiece(owned.weight.spec, owned.weight.block, owned.start, owned.owned.within(part))
                for owned in self.unit.owned_parts()
                if owned.weight.spec.blocked
            ]
            noise = Noise(self.options.config.training.seed, pieces, self.device)
        return RuledPart(
            rule=rule,
            owned=part,
            states=states,
            average=Wide(self._new(numel, self.dtype)) if averages else None,
            matrices=self.unit.matrices(part) if rule.whole_matrices else [],
            noise=noise,
        )

    def step(self, params: StepParams, gradient: Buffer) -> None:
        """Update the master weights, free the reduced gradient, and cast the weights.

        Args:
            params: with tensors in the place of the states.
        """
        self.options.mesh.in_flight.check(f"the update of {self.unit.name}", writes=[self.weights])
        allocation = self.options.tracker.allocate(self.home.scratch_kind, self.temporary)
        values = gradient.data.to(self.dtype)
        for part in self.parts:
            for piece in self._pieces(part):
                self._update(params, part, piece, values[piece.slice()])
        self.cast()
        allocation.end()
        gradient.allocation.end()

    def _pieces(self, part: RuledPart) -> list[Range]:
        """Divide a part if its update needs buffers of its size."""
        buffers = part.rule.copies or part.rule.is_small or not isinstance(self.master, Wide)
        return [part.owned] if part.rule.whole_matrices or not buffers else cut(part.owned)

    def _update(self, params: StepParams, part: RuledPart, piece: Range, gradient: torch.Tensor) -> None:
        """Update elements `piece` of the owned range."""
        at, within = piece.slice(), part.within(piece).slice()
        master, states = self.master.read(at), tuple(state.read(within) for state in part.states)
        arguments = master, gradient, states, self.unit.decayed.within(piece).numel
        if part.rule.whole_matrices:
            products = DTYPES[self.options.config.training.product_precision]
            MATRIX_UPDATES[part.rule.name](params, *arguments, part.matrices, products)
        else:
            UPDATES[part.rule.name](params, *arguments)
        if part.average is not None and params.average:
            part.average.read(within).lerp_(master, params.average)
        if not isinstance(self.master, Wide):
            self.master.write(at, master, None)
        if part.noise is not None:
            for state, numbers, bits in zip(part.states, states, part.bits(piece, params.number), strict=True):
                state.write(within, numbers, bits)

    def cast(self) -> None:
        """Copy the master weights to this rank's compute weights, or to the source of `start_fetch`."""
        target = self.home.compute_weights(self.weights)
        if not isinstance(self.master, Wide) or self.master.data is target:
            return
        if not self.options.optimizer.splits:
            target.copy_(self.master.data)
            return
        for piece in cut(Range(0, len(target))):
            round_away(self.master.data[piece.slice()], target[piece.slice()])

    def begin_average(self, part: RuledPart, piece: Range) -> None:
        """Set the average of elements `piece` of the owned range to their weights."""
        if part.average is not None:
            for each in cut(piece):
                part.average.write(part.within(each).slice(), self.master.read(each.slice()), None)

    def start_fetch(self) -> Pending:
        """Copy the updated weights to the device."""
        return self.home.start_fetch_weights(self.weights)


def cut(whole: Range) -> list[Range]:
    """Cut a range into ranges of at most TOGETHER elements."""
    return [Range(at, min(at + TOGETHER, whole.stop)) for at in range(whole.start, whole.stop, TOGETHER)]
