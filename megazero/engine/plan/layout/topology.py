"""The pipeline, data, context and tensor axes of a world of ranks. Pure: integers only, no process group.

Ranks are numbered pp-major, tp-minor: tensor-parallel neighbours share a node.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from megazero.engine.plan.layout.flat_layout import Range
from megazero.engine.plan.schedule.schedules import placement

AXES = ("pp", "dp", "cp", "tp")
# All of dp x cp, which hold the same weights; parts of these ranks; part of pp. Then a stage's ranks as experts divide
# them: parts of an expert, experts, and the ranks with the same part of the same experts, in two factors.
SUB_AXES = ("data", "shard", "replica", "embedding", "etp", "ep", "expert_shard", "expert_replica")
# axis -> kind of traffic of its collectives, if different from its name
TRAFFIC = dict.fromkeys(("data", "shard", "replica", "expert_shard", "expert_replica"), "dp") | {
    "embedding": "pp",
    "etp": "tp",
    "world": "control",
    "host": "control",
}
# the last two: copies between device and host memory, and between host memory and files
KINDS_OF_TRAFFIC = ("dp", "cp", "ep", "tp", "pp", "control", "pcie", "nvme")
Ranks = tuple[int, ...]  # global ranks, ascending


class Coord(NamedTuple):
    """A rank's coordinate along each axis."""

    pp: int
    dp: int
    cp: int
    tp: int


class Route(NamedTuple):
    """The route of a message between pipeline neighbours.

    Attributes:
        step: 1 to the next rank of the ring, -1 to the previous one.
        lane: communicator of that link and direction. Lane 1 is for the second arm of a V, and for the way back from
            the second of two ranks. So no communicator carries both x and dx, whose order may differ between ranks.
    """

    step: int
    lane: int


def route(place: tuple[int, ...], what: str, to: int) -> Route:
    """Return the route of `what` ("x" or "dx") to virtual stage `to`; `place` is the pipeline rank of every stage."""
    before = to - 1 if what == "x" else to  # the message connects this stage and the next
    down = place[before + 1] - place[before] == -1
    step, lane = (-1, 1) if down else (1, 0)
    return Route(step if what == "x" else -step, lane)


def even_split(num_layers: int, stages: int) -> tuple[int, ...]:
    """Split layers evenly; the first stages take the remainder, one each."""
    each, rest = divmod(num_layers, stages)
    return tuple(each + (stage < rest) for stage in range(stages))


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes: pipeline stages, data-parallel ranks, tensor-parallel parts, context-parallel ranks.

    Attributes:
        shards: neighbouring ranks of dp x cp that ZeRO shards over; the dp x cp / shards groups are replicas. 0: all.
        chunks: virtual stages of each pipeline rank, placed in turn or as a V: see `placement`.
        split: number of layers of every virtual stage; (): even.
        ep, expert_tp: ranks of a stage that the experts of a layer are divided over, and those that share the inner
            width of an expert, neighbours; 0: tp.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    shards: int = 0
    chunks: int = 1
    split: tuple[int, ...] = ()
    v_shaped: bool = False
    cp: int = 1
    ep: int = 1
    expert_tp: int = 0

    def __post_init__(self) -> None:
        assert self.data % (self.shards or self.data) == 0, self
        assert self.data * self.tp % (self.ep * self.etp) == 0, self

    @property
    def placement(self) -> tuple[int, ...]:
        """The pipeline rank of every virtual stage."""
        return placement(self.pp, self.chunks, self.v_shaped)

    @property
    def last_pp(self) -> int:
        """The pipeline rank that holds the last virtual stage; the first is held by rank 0."""
        return self.placement[-1]

    def stages(self, rank: int) -> list[int]:
        """Return the virtual stages of pipeline rank `rank`, chunk by chunk."""
        return [stage for stage, holder in enumerate(self.placement) if holder == rank]

    def links(self) -> list[tuple[int, int, int]]:
        """Return (first of the two ranks, direction, lane) of every pipeline link in use."""
        found: set[tuple[int, int, int]] = set()
        for stage, (here, there) in enumerate(pairwise(self.placement)):
            for sender, what, to in ((here, "x", stage + 1), (there, "dx", stage)):
                if here != there:
                    step, lane = route(self.placement, what, to)
                    found.add((sender if step > 0 else (sender - 1) % self.pp, step, lane))
        return sorted(found)

    @property
    def data(self) -> int:
        """Ranks that hold the same weights."""
        return self.dp * self.cp

    @property
    def shard(self) -> int:
        """Ranks that share one copy of the sharded states."""
        return self.shards or self.data

    @property
    def replica(self) -> int:
        """Copies of the sharded states."""
        return self.data // self.shard

    @property
    def etp(self) -> int:
        """Ranks that share the inner width of an expert."""
        return self.expert_tp or self.tp

    @property
    def expert_shard(self) -> int:
        """Ranks that share one copy of the sharded states of their experts: those within `shard` x tp ranks."""
        return max(1, self.shard * self.tp // (self.ep * self.etp))

    @property
    def expert_replica(self) -> int:
        """Copies of the sharded states of experts."""
        return self.data * self.tp // (self.ep * self.etp * self.expert_shard)

    @property
    def sizes(self) -> dict[str, int]:
        """Return the size of every axis, and of all sub-axes but the embedding's."""
        return {axis: getattr(self, axis) for axis in (*AXES, *SUB_AXES) if axis != "embedding"}

    @property
    def world_size(self) -> int:
        return self.pp * self.data * self.tp

    def coord(self, rank: int) -> Coord:
        return Coord(*(rank // self.stride(axis) % getattr(self, axis) for axis in AXES))

    def rank(self, coord: Coord) -> int:
        return sum(place * self.stride(axis) for axis, place in coord._asdict().items())

    def stride(self, axis: str) -> int:
        """Return the difference of two neighbours' ranks along an axis or a sub-axis."""
        own = dict.fromkeys(("cp", "data", "shard"), self.tp)  # neighbours along cp are neighbours in `data`
        strides = own | {"tp": 1, "dp": self.cp * self.tp, "replica": self.shard * self.tp, "pp": self.data * self.tp}
        expert = self.ep * self.etp
        strides |= {"etp": 1, "ep": self.etp, "expert_shard": expert, "expert_replica": expert * self.expert_shard}
        return strides[axis] if axis != "embedding" else self.last_pp * strides["pp"]

    def stage_ranks(self, pp: int) -> range:
        size = self.stride("pp")
        return range(pp * size, (pp + 1) * size)

    def groups(self, axis: str) -> list[list[int]]:
        """Return all groups of ranks along an axis or a sub-axis; "embedding" joins the first and last stage."""
        if axis == "embedding":
            both = (0, self.stride(axis)) if self.last_pp else (0,)
            return [[first + step for step in both] for first in self.stage_ranks(0)]
        stride, size = self.stride(axis), self.sizes[axis]
        firsts = (rank for rank in range(self.world_size) if rank // stride % size == 0)
        return [list(range(first, first + size * stride, stride)) for first in firsts]

    def chunk_layers(self, num_layers: int, rank: int, chunk: int) -> range:
        """Return the numbers of the layers of one chunk of pipeline rank `rank`."""
        split = self.split or even_split(num_layers, self.pp * self.chunks)
        assert sum(split) == num_layers, (split, num_layers)
        at = self.stages(rank)[chunk]
        start = sum(split[:at])
        return range(start, start + split[at])


def disjoint(groups: Iterable[Ranks]) -> list[list[Ranks]]:
    """Divide groups into lists of disjoint groups; each group goes into the first list that it fits.

    The links of an even ring need two lists, those of an odd ring three.
    """
    found: list[list[Ranks]] = []
    taken: list[set[int]] = []
    for group in groups:
        at = next((i for i, ranks in enumerate(taken) if ranks.isdisjoint(group)), len(found))
        if at == len(found):
            found.append([])
            taken.append(set())
        found[at].append(group)
        taken[at].update(group)
    return found


def ring_bytes(num_bytes: int, size: int, passes: int = 1) -> int:
    """Return the bytes that each of `size` ranks sends when a buffer of `num_bytes` passes around a ring.

    One pass is a reduce-scatter or an all-gather of the whole buffer, two are an all-reduce.
    """
    return passes * num_bytes * (size - 1) // size


def unsent(collective: str, parts: Sequence[Range], place: int) -> int:
    """Return the elements that rank `place` of a ring does not send in one pass of a buffer.

    In an all-gather, each part ends at the rank before its owner; in a reduce-scatter, each sum at its owner.

    Args:
        parts: of the buffer, one per rank.
    """
    return parts[(place + 1) % len(parts) if collective == "all-gather" else place].numel
