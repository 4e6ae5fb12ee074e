"""Planners for torch.distributed.checkpoint (DCP): they divide writing and reading over ranks, and prove coverage.

Note [DCP and us]
DCP gathers the plan of every rank on rank 0, hands each its part back, and tells every rank of a failure of
any. By itself it accepts holes at load, holes at save on one rank, and tensors of which no rank owns
anything; and it weighs replicas by the size of the whole tensor. So the planners are ours. They speak of
`LocalShard`s directly: DCP then needs no tensor subclass. What crosses its object collectives is pickled in
memory; nothing that is pickled touches a disk.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megazero.checkpoint.manifest import Manifest, dtype_name
from megazero.checkpoint.shards import LocalShard
from megazero.plan.regions import Region, coverage_fault

# What a rank says of a tensor, whether or not it owns any of it: its global shape, and its dtype by name.
Declared = tuple[tuple[int, ...], str]


class CoveredSavePlanner(SavePlanner):
    """Plans a save in which every element of every tensor that any rank names is written exactly once."""

    def __init__(self, shards: Mapping[str, LocalShard]) -> None:
        self.shards = shards
        self.data: dict[MetadataIndex, torch.Tensor] = {}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Nothing: the shards came with the constructor."""

    def create_local_plan(self) -> SavePlan:
        """Everything this rank holds; `planner_data` is what it declares."""
        items = []
        for name, shard in self.shards.items():
            chunks = shard.chunks()
            for chunk, (offset, data) in zip(chunks, shard.views(chunks), strict=True):
                index = MetadataIndex(name, offset)
                self.data[index] = data
                items.append(_write_item(index, chunk, shard))
        return SavePlan(items, planner_data=_declare(self.shards))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """On rank 0: drop replicas and prove coverage; ValueError, naming the tensor, where it fails."""
        declared = _agreed_declarations(plan.planner_data for plan in all_plans)
        _prove_coverage(declared, all_plans)
        plans, metadata = create_default_global_save_plan(_without_replicas(all_plans))
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan as rank 0 made it."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The chunk's elements, shaped: a view of the shard's data."""
        return self.data[write_item.index]


def _write_item(index: MetadataIndex, chunk: Region, shard: LocalShard) -> WriteItem:
    return WriteItem(
        index,
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.size)),
            TensorProperties(dtype=shard.data.dtype),
            torch.Size(shard.global_shape),
        ),
    )


def _declare(shards: Mapping[str, LocalShard]) -> dict[str, Declared]:
    return {name: (shard.global_shape, dtype_name(shard.data.dtype)) for name, shard in shards.items()}


def _agreed_declarations(declarations: Iterable[dict[str, Declared]]) -> dict[str, Declared]:
    """All ranks' declarations in one; ValueError if two ranks differ."""
    agreed: dict[str, tuple[int, Declared]] = {}
    for rank, mine in enumerate(declarations):
        for name, declared in mine.items():
            first, theirs = agreed.setdefault(name, (rank, declared))
            if declared != theirs:
                raise ValueError(
                    f"tensor {name!r} is {_of_shape(theirs)} on rank {first}, but {_of_shape(declared)} on rank {rank}"
                )
    return {name: declared for name, (_, declared) in agreed.items()}


def _region(item: WriteItem) -> Region:
    chunk = item.tensor_data.chunk
    return Region(tuple(chunk.offsets), tuple(chunk.sizes))


def _prove_coverage(declared: Mapping[str, Declared], plans: Iterable[SavePlan]) -> None:
    pieces: dict[str, set[Region]] = defaultdict(set)  # sets: replicas are equal, and count once
    for plan in plans:
        for item in plan.items:
            pieces[item.index.fqn].add(_region(item))
    for name, (shape, _) in declared.items():
        fault = coverage_fault(shape, pieces[name])
        if fault:
            raise ValueError(f"tensor {name!r} of shape {shape} is not held exactly once by the ranks: {fault}")


def _without_replicas(plans: list[SavePlan]) -> list[SavePlan]:
    """Each chunk stays with one of its holders: large ones first, each to the holder with the least to write."""
    holders: dict[MetadataIndex, list[int]] = defaultdict(list)
    size: dict[MetadataIndex, int] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders[item.index].append(rank)
            size[item.index] = _region(item).volume * item.tensor_data.properties.dtype.itemsize
    load: Counter[int] = Counter()
    writer: dict[MetadataIndex, int] = {}
    # What only one rank holds is not ours to place: count it first.
    for index in sorted(holders, key=lambda index: (len(holders[index]) > 1, -size[index])):
        writer[index] = min(holders[index], key=lambda rank: (load[rank], rank))
        load[writer[index]] += size[index]
    return [
        replace(plan, items=[item for item in plan.items if writer[item.index] == rank], planner_data=None)
        for rank, plan in enumerate(plans)
    ]


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
        self.metadata: Metadata | None = None

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """`metadata` is the manifest in DCP's terms."""
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """Plan the reads of this rank; ValueError if the manifest does not provide a tensor exactly once."""
        declared = _declare(self.shards)
        items: list[ReadItem] = []
        for name, shard in self.shards.items():
            entry = self.manifest.tensors.get(name)
            if entry is None or (entry.shape, entry.dtype) != declared[name]:
                continue  # rank 0 hears of it from `declared`, and speaks for all
            fault = coverage_fault(entry.shape, [chunk.region for chunk in entry.chunks])
            if fault:
                raise ValueError(f"--load {self.path}: the checkpoint is broken: of tensor {name!r} {fault}")
            regions = shard.regions()
            self.targets |= {MetadataIndex(name, offset): data for offset, data in shard.views(regions)}
            wanted = [ChunkStorageMetadata(torch.Size(r.offset), torch.Size(r.size)) for r in regions]
            items += create_read_items_for_chunk_list(name, self.metadata.state_dict_metadata[name], wanted)
        return LoadPlan(items, planner_data=declared)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """On rank 0: compare what the ranks ask for with what there is; ValueError where they differ."""
        wanted = _agreed_declarations(plan.planner_data for plan in global_plan)
        stored = {name: (entry.shape, entry.dtype) for name, entry in self.manifest.tensors.items()}
        for name in wanted.keys() & stored.keys():
            if wanted[name] != stored[name]:
                self._refuse(f"tensor {name!r} is {_of_shape(stored[name])} there and {_of_shape(wanted[name])} here")
        missing = wanted.keys() - stored.keys()
        unasked = set() if self.partial else stored.keys() - wanted.keys()
        if missing or unasked:
            self._refuse(f"it lacks {_listed(missing)}, and this model lacks {_listed(unasked)}")
        return [replace(plan, planner_data=None) for plan in global_plan]

    def _refuse(self, difference: str) -> None:
        raise ValueError(
            f"--load {self.path} is a checkpoint of another model: {difference}; "
            "give the model the flags that it was saved with"
        )

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The plan as rank 0 saw it."""
        return central_plan

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
