"""Planners for torch.distributed.checkpoint (DCP): they divide writing and reading over ranks, and prove coverage.

Note [DCP and us]
DCP carries what each rank has to say to rank 0, hands each an answer, and tells every rank of a failure of
any. By itself it accepts holes at load, holes at save on one rank, and tensors of which no rank owns
anything; it weighs replicas by the size of the whole tensor; and its own plans hold an object per chunk, which rank 0
would unpickle for a minute where there are a million. So the planners are ours: a rank plans for itself, from its
`LocalShard`s, and what it tells rank 0 is short. What crosses DCP's object collectives is pickled in memory; nothing
that is pickled touches a disk.

Note [short plans]
The layers of a model are alike, and so are weights and moments. A rank's *holding* is what it owns alike of many
tensors: one list of chunks and many names, given as numbers in the rank's table of tensors. Ranks of one pipeline stage
have the same table, so rank 0 parses few. It proves coverage once per kind of tensor. 1.4 million chunks of 10^12
parameters on 1,024 ranks are some dozens of kinds.
"""

import json
import zlib
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)

from megazero.checkpoint.manifest import Entry, Manifest, Tiling, dtype_name, torch_dtype
from megazero.checkpoint.shards import LocalShard
from megazero.plan.layout.regions import Region, Shape, coverage_fault, intersection

# What a rank says of a tensor, whether or not it owns any of it: its global shape, and its dtype by name.
Declared = tuple[Shape, str]
Chunks = tuple[Region, ...]


class Holding(NamedTuple):
    """Tensors of which a rank holds the same chunks."""

    chunks: Chunks
    names: array  # numbers in the rank's table


class RankPlan(NamedTuple):
    """A rank's message to rank 0 before it writes; see Note [short plans]."""

    table: bytes  # see `_table`: the tensors that the rank names
    holdings: list[Holding]

    @classmethod
    def of(cls, shards: Mapping[str, LocalShard]) -> "RankPlan":
        """Plan to write everything that a rank holds."""
        chunks_of: dict[tuple[object, ...], Chunks] = {}
        by_chunks: dict[Chunks, array] = {}
        for at, shard in enumerate(shards.values()):
            kind = shard.global_shape, shard.offset, shard.local_shape, shard.start, shard.stop, shard.data.dtype
            if kind not in chunks_of:
                chunks_of[kind] = tuple(shard.chunks())
            if chunks_of[kind]:
                by_chunks.setdefault(chunks_of[kind], array("I")).append(at)
        return cls(_table(shards), list(map(Holding, by_chunks, by_chunks.values())))


class SaveLayout:
    """The rank that writes each chunk of a checkpoint. Rank 0 makes it from the plans of all ranks.

    Attributes:
        skipped: rank -> (name, offset) of the chunks that it holds, and another rank writes.
        tensors: name -> (dtype, shape, tiling).
    """

    def __init__(self, plans: Sequence[RankPlan]) -> None:
        """ValueError, naming the tensor, where ranks differ, or an element is held by none or in two pieces."""
        tables = {table: _parse_table(table) for table in dict.fromkeys(plan.table for plan in plans)}
        names_of = {table: list(declared) for table, declared in tables.items()}
        self._names = [names_of[plan.table] for plan in plans]
        self._plans = plans
        declared = _agreed_declarations([tables[plan.table] for plan in plans])
        kinds: dict[Chunks, int] = {}
        held: dict[str, list[tuple[int, int]]] = {name: [] for name in declared}  # (rank, number of its chunks)
        for rank, plan in enumerate(plans):
            names = self._names[rank]
            for holding in plan.holdings:
                kind = kinds.setdefault(holding.chunks, len(kinds))
                for at in holding.names:
                    held[names[at]].append((rank, kind))
        chunks = list(kinds)
        alike: dict[tuple[Shape, str, tuple[tuple[int, int], ...]], list[str]] = defaultdict(list)
        for name, holders in held.items():
            alike[(*declared[name], tuple(holders))].append(name)
        self.skipped: list[set[tuple[str, Shape]]] = [set() for _ in plans]
        self.tensors: dict[str, tuple[str, Shape, Tiling]] = {}
        replicated: list[tuple[int, str, Region, list[int]]] = []  # (bytes, name, chunk, holders)
        load: Counter[int] = Counter()  # bytes that only one rank holds are counted first: they are not ours to place
        writers: dict[str, dict[Region, int]] = {}
        for (shape, dtype, holders), names in alike.items():
            ranks_of: dict[Region, list[int]] = defaultdict(list)
            for rank, kind in holders:
                for chunk in chunks[kind]:
                    ranks_of[chunk].append(rank)
            fault = coverage_fault(shape, ranks_of)
            if fault:
                raise ValueError(f"tensor {names[0]!r} of shape {shape} is not held exactly once by the ranks: {fault}")
            itemsize = torch_dtype(dtype).itemsize
            writer = {}
            for chunk, ranks in sorted(ranks_of.items(), key=lambda item: item[0].offset):
                writer[chunk] = ranks[0]
                if len(ranks) == 1:
                    load[ranks[0]] += len(names) * chunk.volume * itemsize
                else:
                    replicated += [(chunk.volume * itemsize, name, chunk, ranks) for name in names]
            tiling = _tiling(writer)
            alone = all(len(ranks) == 1 for ranks in ranks_of.values())
            for name in names:
                self.tensors[name] = dtype, shape, tiling
                if not alone:
                    writers[name] = dict(writer)
        self._place(replicated, load, writers)
        self.tensors = {name: self.tensors[name] for name in declared}  # in the order of the model

    def _place(
        self,
        replicated: list[tuple[int, str, Region, list[int]]],
        load: Counter[int],
        writers: dict[str, dict[Region, int]],
    ) -> None:
        """Give each replicated chunk to one holder: large ones first, each to the one with the least to write."""
        for num_bytes, name, chunk, ranks in sorted(replicated, key=lambda item: -item[0]):
            chosen = min(ranks, key=lambda rank: (load[rank], rank))
            load[chosen] += num_bytes
            writers[name][chunk] = chosen
            for rank in ranks:
                if rank != chosen:
                    self.skipped[rank].add((name, chunk.offset))
        shared: dict[Tiling, Tiling] = {}
        for name, writer in writers.items():
            dtype, shape, _ = self.tensors[name]
            tiling = _tiling(writer)
            self.tensors[name] = dtype, shape, shared.setdefault(tiling, tiling)

    def entries(self, checksums: Sequence[Sequence[int]]) -> dict[str, Entry]:
        """Return the manifest's entries from the checksums that each rank has written, in the order of `written`."""
        found = {name: [0] * len(tiling.files) for name, (_, _, tiling) in self.tensors.items()}
        numbers: dict[int, dict[Region, int]] = {}  # of a tiling's chunks
        places: dict[tuple[int, int], list[int]] = {}  # of a holding's chunks in a tiling
        for rank, plan in enumerate(self._plans):
            crcs, names, skipped = checksums[rank], self._names[rank], self.skipped[rank]
            skipping, at = {name for name, _ in skipped}, 0
            for holding in plan.holdings:
                for name in map(names.__getitem__, holding.names):
                    tiling, into = self.tensors[name][2], found[name]
                    kind = id(tiling), id(holding)
                    if kind not in places:
                        if id(tiling) not in numbers:
                            numbers[id(tiling)] = {chunk: place for place, chunk in enumerate(tiling.regions)}
                        number = numbers[id(tiling)]
                        places[kind] = [number[chunk] for chunk in holding.chunks]
                    mine = places[kind]
                    if name in skipping:
                        both = zip(holding.chunks, mine, strict=True)
                        mine = [place for chunk, place in both if (name, chunk.offset) not in skipped]
                    for place in mine:
                        into[place] = crcs[at]
                        at += 1
            assert at == len(crcs), f"rank {rank} wrote {len(crcs)} chunks, and {at} were planned"
        return {name: Entry(*known, tuple(found[name])) for name, known in self.tensors.items()}


def written(plan: RankPlan, names: Sequence[str], skipped: set[tuple[str, Shape]]) -> list[tuple[str, Region]]:
    """The chunks that a rank writes, in the order of its file and of its checksums."""
    return [
        (names[at], chunk)
        for holding in plan.holdings
        for at in holding.names
        for chunk in holding.chunks
        if (names[at], chunk.offset) not in skipped
    ]


def file_name(rank: int) -> str:
    """The file that a rank writes."""
    return f"rank_{rank:05d}.safetensors"


def _tiling(writer: Mapping[Region, int]) -> Tiling:
    return Tiling(tuple(writer), tuple(map(file_name, writer.values())))


class CoveredSavePlanner(SavePlanner):
    """Plans a save in which every element of every tensor that any rank names is written exactly once.

    Attributes:
        layout: on rank 0, where everything is written; see `SaveLayout`.
    """

    def __init__(self, shards: Mapping[str, LocalShard]) -> None:
        self.shards = shards
        self.data: dict[MetadataIndex, torch.Tensor] = {}
        self.layout: SaveLayout | None = None

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Nothing: the shards came with the constructor."""

    def create_local_plan(self) -> SavePlan:
        """Everything this rank holds, as `planner_data`. The items come in `finish_plan`."""
        self._plan = RankPlan.of(self.shards)
        return SavePlan([], planner_data=self._plan)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """On rank 0: drop replicas and prove coverage; ValueError, naming the tensor, where it fails."""
        self.layout = SaveLayout([plan.planner_data for plan in all_plans])
        return [SavePlan([], planner_data=skipped) for skipped in self.layout.skipped], Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The chunks that this rank writes: all that it holds, without those that rank 0 gave to others."""
        items = []
        views: dict[str, dict[Region, torch.Tensor]] = {}
        for name, chunk in written(self._plan, list(self.shards), new_plan.planner_data):
            shard = self.shards[name]
            if name not in views:
                chunks = shard.chunks()
                views[name] = {c: data for c, (_, data) in zip(chunks, shard.views(chunks), strict=True)}
            index = MetadataIndex(name, chunk.offset)
            self.data[index] = views[name][chunk]
            items.append(WriteItem(index, WriteItemType.SHARD))
        return SavePlan(items)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The chunk's elements, shaped: a view of the shard's data."""
        return self.data[write_item.index]


def _table(shards: Mapping[str, LocalShard]) -> bytes:
    """Return the tensors that a rank names, as bytes: equal on ranks that name the same."""
    declared = [(name, (shard.global_shape, dtype_name(shard.data.dtype))) for name, shard in shards.items()]
    return zlib.compress(json.dumps(declared).encode(), 1)


def _parse_table(table: bytes) -> dict[str, Declared]:
    return {name: (tuple(shape), dtype) for name, (shape, dtype) in json.loads(zlib.decompress(table))}


def _agreed_declarations(tables: Sequence[dict[str, Declared]]) -> dict[str, Declared]:
    """All ranks' declarations in one; ValueError if two ranks differ. Ranks may share an object."""
    agreed: dict[str, tuple[int, Declared]] = {}
    seen: set[int] = set()
    for rank, table in enumerate(tables):
        if id(table) in seen:
            continue
        seen.add(id(table))
        for name, declared in table.items():
            first, theirs = agreed.setdefault(name, (rank, declared))
            if declared != theirs:
                raise ValueError(
                    f"tensor {name!r} is {_of_shape(theirs)} on rank {first}, but {_of_shape(declared)} on rank {rank}"
                )
    return {name: declared for name, (_, declared) in agreed.items()}


class Read(NamedTuple):
    """A part of a stored chunk, and where it goes."""

    chunk: int  # number in the tensor's tiling
    region: int  # number among the regions of the shard
    from_chunk: Shape  # offset within the chunk
    into: Shape  # offset within the region
    size: Shape


def reads(tiling: Tiling, wanted: Sequence[Region]) -> list[Read]:
    """The parts of a tiling's chunks that together are the regions `wanted`."""
    found = []
    for number, chunk in enumerate(tiling.regions):
        for at, region in enumerate(wanted):
            both = intersection(chunk, region)
            if both is not None:
                begin, into = _minus(both.offset, chunk.offset), _minus(both.offset, region.offset)
                found.append(Read(number, at, begin, into, both.size))
    return found


def _minus(a: Shape, b: Shape) -> Shape:
    return tuple(x - y for x, y in zip(a, b, strict=True))


class CoveredLoadPlanner(LoadPlanner):
    """Plans a load in which every element that a rank asks for is provided exactly once, whoever saved it.

    The checkpoint must hold the tensors that the ranks together name, of the same shapes and dtypes, and no
    others; with `partial` it may hold others.
    """

    def __init__(self, shards: Mapping[str, LocalShard], path: Path, manifest: Manifest, partial: bool = False) -> None:
        self.shards, self.partial = shards, partial
        self.path = path
        self.manifest = manifest
        self.targets: dict[MetadataIndex, torch.Tensor] = {}

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Nothing: shards and manifest came with the constructor."""

    def create_local_plan(self) -> LoadPlan:
        """Tell rank 0 the tensors that this rank names, as `planner_data`. The items come in `finish_plan`."""
        return LoadPlan([], planner_data=_table(self.shards))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """On rank 0: compare what the ranks ask for with what there is; ValueError where they differ."""
        tables = {table: _parse_table(table) for table in dict.fromkeys(plan.planner_data for plan in global_plan)}
        wanted = _agreed_declarations([tables[plan.planner_data] for plan in global_plan])
        stored = {name: (entry.shape, entry.dtype) for name, entry in self.manifest.tensors.items()}
        for name in wanted.keys() & stored.keys():
            if wanted[name] != stored[name]:
                self._refuse(f"tensor {name!r} is {_of_shape(stored[name])} there and {_of_shape(wanted[name])} here")
        missing = wanted.keys() - stored.keys()
        unasked = set() if self.partial else stored.keys() - wanted.keys()
        if missing or unasked:
            self._refuse(f"it lacks {_listed(missing)}, and this model lacks {_listed(unasked)}")
        self._prove_coverage(wanted)
        return [LoadPlan([]) for _ in global_plan]

    def _prove_coverage(self, names: Iterable[str]) -> None:
        proven: set[tuple[Shape, int]] = set()
        for name in names:
            entry = self.manifest.tensors[name]
            if (entry.shape, id(entry.tiling.regions)) not in proven:
                fault = coverage_fault(entry.shape, entry.tiling.regions)
                if fault:
                    raise ValueError(f"--load {self.path}: the checkpoint is broken: of tensor {name!r} {fault}")
                proven.add((entry.shape, id(entry.tiling.regions)))

    def _refuse(self, difference: str) -> None:
        raise ValueError(
            f"--load {self.path} is a checkpoint of another model: {difference}; "
            "give the model the flags that it was saved with"
        )

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The reads of this rank."""
        planned: dict[tuple[object, ...], tuple[list[Region], list[Read]]] = {}
        items: list[ReadItem] = []
        for name, shard in self.shards.items():
            tiling = self.manifest.tensors[name].tiling
            kind = id(tiling.regions), shard.offset, shard.local_shape, shard.start, shard.stop
            if kind not in planned:
                regions = shard.regions()
                planned[kind] = regions, reads(tiling, regions)
            regions, parts = planned[kind]
            views = [data for _, data in shard.views(regions)]
            for part in parts:
                where = MetadataIndex(name, regions[part.region].offset, part.region)
                source = MetadataIndex(name, tiling.regions[part.chunk].offset, part.chunk)
                self.targets[where] = views[part.region]
                items.append(
                    ReadItem(
                        LoadItemType.TENSOR,
                        dest_index=where,
                        dest_offsets=torch.Size(part.into),
                        storage_index=source,
                        storage_offsets=torch.Size(part.from_chunk),
                        lengths=torch.Size(part.size),
                    )
                )
        return LoadPlan(items)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Never: a checkpoint holds tensors only, and bytes would be a pickle."""
        raise AssertionError(read_item)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The part of the shard's data that the item fills: a view of it."""
        target = self.targets[read_item.dest_index]
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing: it was filled in place."""


def _of_shape(declared: Declared) -> str:
    shape, dtype = declared
    return f"{dtype} of shape {shape}"


def _listed(names: Iterable[str], limit: int = 3) -> str:
    ordered = sorted(names)
    if not ordered:
        return "no tensor"
    shown = ", ".join(map(repr, ordered[:limit]))
    return shown if len(ordered) <= limit else f"{shown} and {len(ordered) - limit} more"
