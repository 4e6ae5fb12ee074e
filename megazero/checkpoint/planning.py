"""Plans of a save and of a load: they divide the work over ranks, and prove that every element is covered once.

Note [short plans]
Layers of a model have equal shapes, and so do weights and moments. A rank's *holding* is one list of chunks and the
tensors of which the rank owns exactly these chunks, given as numbers in the rank's table of tensors. Ranks of one
pipeline stage have the same table, so rank 0 parses few. It proves coverage once per kind of tensor: the 1.4 million
chunks of 10^12 parameters on 1,024 ranks are a few dozen kinds.
"""

import json
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import torch

from megazero.checkpoint.manifest import Manifest, StoredTensor, Tiling, dtype_name, key, torch_dtype
from megazero.checkpoint.regions import Region, Shape, coverage_fault, intersection
from megazero.checkpoint.shards import LocalShard, owned_chunks, views_of

# Global shape and dtype, by name, of a tensor. A rank declares tensors of which it owns nothing, too.
Declared = tuple[Shape, str]
Chunks = tuple[Region, ...]
Skipped = set[tuple[str, Shape]]  # (name, offset) of the chunks that a rank holds, and another rank writes


class Holding(NamedTuple):
    """Tensors of which a rank holds the same chunks."""

    chunks: Chunks
    names: list[int]  # numbers in the rank's table


class RankPlan(NamedTuple):
    """A rank's message to rank 0 before it writes; see Note [short plans]."""

    table: bytes  # see `table_of`
    holdings: list[Holding]

    @classmethod
    def of(cls, shards: Mapping[str, LocalShard]) -> Self:
        """Plan to write everything that a rank holds."""
        chunks_of: dict[tuple[object, ...], Chunks] = {}
        by_chunks: dict[Chunks, list[int]] = {}
        for at, shard in enumerate(shards.values()):
            kind = *shard.geometry, shard.data.dtype
            if kind not in chunks_of:
                chunks_of[kind] = tuple(owned_chunks(shard))
            if chunks_of[kind]:
                by_chunks.setdefault(chunks_of[kind], []).append(at)
        return cls(table_of(shards), list(map(Holding, by_chunks, by_chunks.values())))


class SaveLayout:
    """The rank that writes each chunk of a checkpoint. Rank 0 makes it from the plans of all ranks.

    Attributes:
        skipped: of each rank.
        tensors: name -> (dtype, shape, tiling).
        num_bytes: rank -> bytes of the tensors that it writes.
    """

    def __init__(self, plans: Sequence[RankPlan]) -> None:
        """ValueError, naming the tensor, where ranks differ, or an element is held by none or in two pieces."""
        self._plans = plans
        tables = _parse_tables(plan.table for plan in plans)
        self._names = [list(table) for table in tables]
        declared = _agreed_declarations(tables)
        self.skipped: list[Skipped] = [set() for _ in plans]
        tensors: dict[str, tuple[str, Shape, Tiling]] = {}
        replicated: list[tuple[int, str, Region, list[int]]] = []  # (bytes, name, chunk, holders)
        load = self.num_bytes = Counter[int]()  # chunks with one holder first, because they cannot be moved
        for (shape, dtype), holders_of, names in self._kinds(declared):
            fault = coverage_fault(shape, holders_of)
            if fault:
                raise ValueError(f"tensor {names[0]!r} of shape {shape} is not held exactly once by the ranks: {fault}")
            chunks = sorted(holders_of, key=lambda chunk: chunk.offset)
            tiling = Tiling.of(chunks, [file_name(holders_of[chunk][0]) for chunk in chunks])
            for name in names:
                tensors[name] = dtype, shape, tiling
            for chunk in chunks:
                holders, num_bytes = holders_of[chunk], chunk.volume * torch_dtype(dtype).itemsize
                if len(holders) == 1:
                    load[holders[0]] += len(names) * num_bytes
                else:
                    replicated += [(num_bytes, name, chunk, holders) for name in names]
        self.tensors = {name: tensors[name] for name in declared}  # in the order of the model
        self._place(replicated, load)

    def _kinds(self, declared: Mapping[str, Declared]) -> Iterable[tuple[Declared, dict[Region, list[int]], list[str]]]:
        """Yield (declaration, chunk -> ranks that hold it, names) of tensors that are declared and held equally."""
        numbers: dict[Chunks, int] = {}
        held: dict[str, list[tuple[int, int]]] = {name: [] for name in declared}  # (rank, number of its chunks)
        for rank, (plan, names) in enumerate(zip(self._plans, self._names, strict=True)):
            for holding in plan.holdings:
                number = numbers.setdefault(holding.chunks, len(numbers))
                for at in holding.names:
                    held[names[at]].append((rank, number))
        chunks = list(numbers)
        equal: dict[tuple[Declared, tuple[tuple[int, int], ...]], list[str]] = defaultdict(list)
        for name, holders in held.items():
            equal[declared[name], tuple(holders)].append(name)
        for (declaration, held_by), names in equal.items():
            holders_of: dict[Region, list[int]] = defaultdict(list)
            for rank, number in held_by:
                for chunk in chunks[number]:
                    holders_of[chunk].append(rank)
            yield declaration, holders_of, names

    def _place(self, replicated: list[tuple[int, str, Region, list[int]]], load: Counter[int]) -> None:
        """Give each replicated chunk to one holder: large ones first, each to the one with the least to write."""
        placed: dict[str, dict[Shape, str]] = defaultdict(dict)  # name -> offset of a chunk -> its file
        for num_bytes, name, chunk, holders in sorted(replicated, key=lambda item: -item[0]):
            writer = min(holders, key=lambda rank: (load[rank], rank))
            load[writer] += num_bytes
            placed[name][chunk.offset] = file_name(writer)
            for rank in holders:
                if rank != writer:
                    self.skipped[rank].add((name, chunk.offset))
        for name, files in placed.items():
            dtype, shape, tiling = self.tensors[name]
            every = tuple(files.get(at, file) for at, file in zip(tiling.offset, tiling.file, strict=True))
            self.tensors[name] = dtype, shape, Tiling(tiling.offset, tiling.size, every)

    def stored(self, checksums: Sequence[Sequence[int]]) -> tuple[list[Tiling], dict[str, StoredTensor]]:
        """Return the manifest's tilings and tensors.

        Args:
            checksums: of each rank's chunks, in the order of `own_chunks`.
        """
        found: dict[str, dict[Shape, int]] = {name: {} for name in self.tensors}  # by offset of the chunk
        for plan, names, skipped, written in zip(self._plans, self._names, self.skipped, checksums, strict=True):
            left = iter(written)
            for holding in plan.holdings:
                for name in map(names.__getitem__, holding.names):
                    for chunk in holding.chunks:
                        if (name, chunk.offset) not in skipped:
                            found[name][chunk.offset] = next(left)
            assert next(left, None) is None, f"{len(written)} chunks were written, and fewer were planned"
        numbers: dict[Tiling, int] = {}
        tensors = {}
        for name, (dtype, shape, tiling) in self.tensors.items():
            crc32 = tuple(map(found[name].__getitem__, tiling.offset))
            tensors[name] = StoredTensor(dtype, shape, numbers.setdefault(tiling, len(numbers)), crc32)
        return list(numbers), tensors


def own_chunks(plan: RankPlan, shards: Mapping[str, LocalShard], skipped: Skipped) -> list[tuple[str, torch.Tensor]]:
    """Return (key, elements) of the chunks that a rank writes, in the order of its file."""
    names = list(shards)
    return [
        (key(names[at], chunk.offset), data)
        for holding in plan.holdings
        for at in holding.names
        for chunk, data in zip(holding.chunks, views_of(shards[names[at]], holding.chunks), strict=True)
        if (names[at], chunk.offset) not in skipped
    ]


def file_name(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank_{rank:05d}.safetensors"


def table_of(shards: Mapping[str, LocalShard]) -> bytes:
    """Return the declarations of a rank's tensors, as bytes: equal on ranks that declare the same."""
    declared = [(name, (shard.global_shape, dtype_name(shard.data.dtype))) for name, shard in shards.items()]
    return zlib.compress(json.dumps(declared).encode(), 1)


def _parse_tables(tables: Iterable[bytes]) -> list[dict[str, Declared]]:
    """Parse the tables of all ranks; equal ones become one object."""
    tables = list(tables)
    parsed = {
        table: {name: (tuple(shape), dtype) for name, (shape, dtype) in json.loads(zlib.decompress(table))}
        for table in dict.fromkeys(tables)
    }
    return [parsed[table] for table in tables]


def _agreed_declarations(tables: Sequence[dict[str, Declared]]) -> dict[str, Declared]:
    """Merge the declarations of all ranks; ValueError if two ranks differ."""
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


def check_request(path: Path, manifest: Manifest, tables: Sequence[bytes], partial: bool = False) -> None:
    """Compare the tensors that all ranks ask for with those of the checkpoint `path`, and prove their coverage.

    Args:
        tables: of each rank, see `table_of`.
        partial: the checkpoint may hold tensors that no rank asks for.

    Raises:
        ValueError: a name, shape or dtype differs, or the checkpoint does not hold every element exactly once.
    """
    wanted = _agreed_declarations(_parse_tables(tables))
    stored = {name: (tensor.shape, tensor.dtype) for name, tensor in manifest.tensors.items()}
    missing = wanted.keys() - stored.keys()
    unasked = set() if partial else stored.keys() - wanted.keys()
    differences = [
        f"tensor {name!r} is {_of_shape(stored[name])} there and {_of_shape(declared)} here"
        for name, declared in wanted.items()
        if name in stored and declared != stored[name]
    ]
    if missing or unasked:
        differences.append(f"it lacks {_listed(missing)}, and this model lacks {_listed(unasked)}")
    if differences:
        raise ValueError(
            f"--load {path} is a checkpoint of another model: {differences[0]}; "
            "give the model the flags that it was saved with"
        )
    proven: set[tuple[object, ...]] = set()
    for name, (shape, _) in wanted.items():
        tiling = manifest.tiling(name)
        kind = shape, tiling.offset, tiling.size
        if kind not in proven:
            fault = coverage_fault(shape, tiling.regions)
            if fault:
                raise ValueError(f"--load {path}: the checkpoint is broken: of tensor {name!r} {fault}")
            proven.add(kind)


class Read(NamedTuple):
    """A part of a stored chunk, and its place in a region of a shard."""

    chunk: int  # number in the tensor's tiling
    part: tuple[slice, ...]  # of the chunk
    region: int  # number among the regions of the shard
    place: tuple[slice, ...]  # in the region


def reads(tiling: Tiling, wanted: Sequence[Region]) -> list[Read]:
    """Return the parts of a tiling's chunks that together are the regions `wanted`."""
    found = []
    for number, chunk in enumerate(tiling.regions):
        for at, region in enumerate(wanted):
            both = intersection(chunk, region)
            if both is not None:
                found.append(Read(number, _within(both, chunk), at, _within(both, region)))
    return found


def _within(part: Region, whole: Region) -> tuple[slice, ...]:
    """Return the index of a part of a region in the region's data."""
    dims = zip(part.offset, whole.offset, part.size, strict=True)
    return tuple(slice(offset - base, offset - base + size) for offset, base, size in dims)


def _of_shape(declared: Declared) -> str:
    shape, dtype = declared
    return f"{dtype} of shape {shape}"


def _listed(names: Iterable[str], limit: int = 3) -> str:
    ordered = sorted(names)
    if not ordered:
        return "no tensor"
    shown = ", ".join(map(repr, ordered[:limit]))
    return shown if len(ordered) <= limit else f"{shown} and {len(ordered) - limit} more"
