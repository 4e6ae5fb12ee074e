"""A unit on one rank: the parameters that are gathered, reduced and updated together, and their flat buffer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megazero.comm.mesh import Mesh
from megazero.memory.tracker import MemoryTracker
from megazero.model.weight import Weight
from megazero.plan.flat_layout import Range
from megazero.plan.owned import overlap
from megazero.plan.parameters import LocalBlock, ParamSpec, unit_layout
from megazero.plan.zero_policy import NOTHING_PERSISTENT, PersistentGradients, ZeroPolicy


@dataclass(frozen=True)
class ZeroOptions:
    """Options that all units of a rank share."""

    policy: ZeroPolicy
    mesh: Mesh
    tracker: MemoryTracker
    dtype: torch.dtype = torch.float32
    grad_dtype: torch.dtype = torch.float32
    bucket_size: int = 40_000_000  # elements
    overlap: bool = True
    persistent: PersistentGradients = NOTHING_PERSISTENT
    sequence_parallel: bool = False
    trains: bool = True  # else there are no gradients and no moments
    poison: bool = False  # fill memory that must not be read with NaN

    @property
    def master_dtype(self) -> torch.dtype:
        """The dtype of master weights, moments and norms."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


class Member(NamedTuple):
    """A weight of a unit, and its window of the flat buffer, padding rows included."""

    weight: Weight
    window: Range

    @property
    def spec(self) -> ParamSpec:
        return self.weight.spec

    @property
    def block(self) -> LocalBlock:
        return self.weight.block

    @property
    def trains(self) -> bool:
        return self.weight.trains


class OwnedPart(NamedTuple):
    """The part of a weight that this rank owns: the flat range [start, stop) of its local block."""

    weight: Weight
    start: int
    stop: int
    owned: Range  # the same range, within the owned range of the unit

    @property
    def spec(self) -> ParamSpec:
        return self.weight.spec

    @property
    def block(self) -> LocalBlock:
        return self.weight.block


class FlatUnit:
    """Layout of a unit: where each parameter lies in the flat buffer [numel], and which range this rank owns."""

    def __init__(self, name: str, weights: list[Weight], options: ZeroOptions) -> None:
        mesh = options.mesh
        self.name = name
        self.layout = unit_layout([weight.spec for weight in weights], mesh.layout.sizes, mesh.shard.size)
        self.members = [Member(weight, self.layout.windows[weight.spec.name]) for weight in weights]
        whole = Range(0, self.numel)
        self.owned = self.layout.owned(mesh.shard.rank, mesh.shard.size) if options.policy.optimizer else whole

    @property
    def numel(self) -> int:
        return self.layout.numel

    @property
    def trains(self) -> bool:
        """True if any parameter trains."""
        return any(member.trains for member in self.members)

    @property
    def num_decayed(self) -> int:
        """Elements at the start of the owned range that weight decay applies to."""
        return self.layout.decayed.within(self.owned).numel

    def owned_in(self, ranges: Iterable[Range]) -> list[Range]:
        """Return the parts of `ranges` that this rank owns, counted from its start; empty ones are left out."""
        return [part for part in (r.within(self.owned) for r in ranges) if part.numel]

    def owned_parts(self) -> Iterator[OwnedPart]:
        """Yield every weight's part of the owned range, possibly empty. Gaps and padding are left out."""
        for weight, window in self.members:
            yield OwnedPart(weight, *overlap(window, weight.block, self.owned))
