"""A unit on one rank: parameters that are gathered, reduced and updated together in one flat buffer."""

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megazero.engine.memory.tracker import MemoryTracker
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.model.layers.context import DTYPES
from megazero.engine.model.layers.weight import Weight
from megazero.engine.optim.muon import OwnedMatrices
from megazero.engine.options.optimizers import Optimizer
from megazero.engine.options.schema import StepConfig
from megazero.engine.plan.layout.flat_layout import Range, equal_ranges, overlap
from megazero.engine.plan.layout.parameters import unit_layout
from megazero.engine.plan.optimizer_sizes import OptimizerSizes, OwnedSizes
from megazero.engine.plan.program.rank_spec import RankSpec


@dataclass(frozen=True)
class ZeroOptions:
    """Values that all units of a rank share; `config` is resolved."""

    config: StepConfig
    mesh: Mesh
    tracker: MemoryTracker

    @functools.cached_property
    def sizes(self) -> OptimizerSizes:
        return OptimizerSizes(self.config)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.config.training.precision]

    @property
    def grad_dtype(self) -> torch.dtype:
        return DTYPES[self.config.training.grad_dtype]

    @property
    def optimizer(self) -> Optimizer:
        return self.sizes.rules

    @property
    def master_dtype(self) -> torch.dtype:
        """The dtype of master weights and norms."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


class Member(NamedTuple):
    """A weight of a unit, and its window of the flat buffer, padding rows included."""

    weight: Weight
    window: Range


class OwnedPart(NamedTuple):
    """The part of a weight that this rank owns: the flat range [start, stop) of its local block."""

    weight: Weight
    start: int
    stop: int
    owned: Range  # the same range, within the owned range of the unit


class FlatUnit:
    """Offsets of a unit's parameters in its flat buffer [numel], and the range that this rank owns.

    Attributes:
        shard, replica: axes of the ranks that share a copy, and of the ranks that own the same range.
        ranges: of every rank of `shard`.
        uneven: the ranges again; empty if they are equally long and in the order of the ranks.
        on_host: master weights, optimizer states and reduced gradients are in host memory.
    """

    def __init__(self, name: str, weights: list[Weight], mesh: Mesh, spec: RankSpec) -> None:
        group = spec.group(name)
        self.name, self.group, self.policy, self.mesh = name, group, group.policy, mesh
        self.shard, self.replica = mesh.axis(group.axis), mesh.axis(group.replica_axis)
        self.layout = unit_layout([weight.spec for weight in weights], mesh.layout.sizes, group.shards)
        planned = spec.units[name]
        self.ranges, self.on_host, self.trains = planned.owned, planned.on_host, planned.trains
        self.uneven = () if self.ranges == equal_ranges(self.numel, len(self.ranges)) else self.ranges
        self.members = [Member(weight, self.layout.windows[weight.spec.name]) for weight in weights]
        self.owned = self.ranges[self.shard.rank]

    @property
    def numel(self) -> int:
        return self.layout.numel

    @property
    def decayed(self) -> Range:
        """The part of the owned range, at its start, that weight decay applies to."""
        return self.layout.decayed.within(self.owned)

    def sizes(self, options: ZeroOptions) -> OwnedSizes:
        """Return the bytes of the owned range, at rest and in an update."""
        return options.sizes.owned(self.layout, self.owned, self.mesh.layout.sizes)

    def matrices(self, part: Range) -> list[OwnedMatrices]:
        """Return the matrices in a part of the owned range, which has whole pieces of weights."""
        found = []
        for weight, start, stop, owned in self.owned_parts():
            within, spec = owned.within(part), weight.spec
            matrices = spec.flat(weight.block).matrices
            if matrices is None or spec.matrices is None or start == stop or within.numel < owned.numel:
                continue
            inner = weight.block.stored[spec.leading :]
            shape = owned.numel // math.prod(inner), *inner
            numbers = (0, *(dim - spec.leading + 1 for dim in spec.matrices if dim >= spec.leading))
            axis = self.mesh.axis(matrices.axis) if matrices.axis else None
            found.append(
                OwnedMatrices(
                    matrices=matrices,
                    owned=within,
                    shape=shape,
                    numbers=numbers,
                    ranks=axis if axis and axis.peers else None,
                )
            )
        return found

    def owned_in(self, ranges: Iterable[Range]) -> list[Range]:
        """Return the non-empty parts of `ranges` inside the owned range, counted from its start."""
        return [part for part in (r.within(self.owned) for r in ranges) if part.numel]

    def owned_parts(self) -> Iterator[OwnedPart]:
        """Yield every weight's part of the owned range, possibly empty, without gaps and padding."""
        for weight, window in self.members:
            yield OwnedPart(weight, *overlap(window, weight.block.numel, self.owned))
