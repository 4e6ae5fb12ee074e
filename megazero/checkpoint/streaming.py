"""Whole tensors of a checkpoint, read and written one at a time by one process, without a model."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from megazero.checkpoint.folders import commit, partial_folder
from megazero.checkpoint.manifest import (
    MANIFEST,
    STATE,
    Manifest,
    StoredTensor,
    Tiling,
    attach,
    damage,
    dtype_name,
    key,
    read_manifest,
    torch_dtype,
    write_durably,
    write_manifest,
)
from megazero.checkpoint.planning import file_name
from megazero.checkpoint.regions import Region, coverage_fault, split
from megazero.checkpoint.shards import CHUNK_BYTES, LocalShard
from megazero.checkpoint.storage import ChunkReader
from megazero.checkpoint.tensor_file import TensorFile
from megazero.files import crc32, sync_folder

FILE_BYTES = 4 << 30  # limit of a file, unless a single tensor is larger
BAND_BYTES = 256 << 20  # limit of a band, in fp32: the part of a large table that is in memory at once


def bands(shape: tuple[int, ...]) -> list[slice]:
    """Divide the rows of an fp32 tensor into bands of at most BAND_BYTES, or one row, each of whole chunks."""
    if not shape:
        return [slice(None)]
    chunk = _chunks(shape)[0].size
    at_once, limit = (chunk[0], CHUNK_BYTES) if chunk[1:] == shape[1:] else (1, 4 * math.prod(shape[1:]))
    rows = at_once * max(1, BAND_BYTES // limit)
    return [slice(at, min(at + rows, shape[0])) for at in range(0, shape[0], rows)]


class TensorReader:
    """Reads whole tensors of a checkpoint folder, each from its chunks when it is asked for."""

    def __init__(self, path: Path) -> None:
        """Damaged if the manifest is not whole."""
        self.path = path
        self.manifest = read_manifest(path)

    def read(self, name: str, rows: slice = slice(None)) -> torch.Tensor:
        """Return a tensor, or rows of it. Damaged if a checksum is wrong or a file cannot be read."""
        stored = self.manifest.tensors[name]
        fault = coverage_fault(stored.shape, self.manifest.tiling(name).regions)
        if fault:
            raise damage(self.path, MANIFEST, f"of tensor {name!r} {fault}")
        offset, size = [0] * len(stored.shape), list(stored.shape)
        if size:
            offset[0], stop, _ = rows.indices(size[0])
            size[0] = stop - offset[0]
        found = torch.empty(size, dtype=torch_dtype(stored.dtype))
        shard = LocalShard(
            global_shape=stored.shape,
            offset=tuple(offset),
            local_shape=tuple(size),
            start=0,
            stop=found.numel(),
            data=found.view(-1),
        )
        ChunkReader(self.path, self.manifest).fill({name: shard})
        return found


def write_checkpoint(
    root: Path,
    iteration: int,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterator[Iterable[torch.Tensor]],
    state: Any,
    attached: Mapping[str, bytes],
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write the checkpoint `root/iter_NNNNNNN` and point `root/latest` at it; returns its path.

    Args:
        shapes: of all tensors, by global name.
        tensors: yields them in that order, each as its `bands`, or as one; each is freed before the next is asked for.
        state: JSON.
        attached: files, as in `save`.
        dtype: of all tensors.
    """
    folder = partial_folder(root, iteration)
    folder.mkdir(parents=True)
    files: dict[str, int] = {}
    tilings: dict[Tiling, int] = {}  # -> number
    stored: dict[str, StoredTensor] = {}
    for number, names in enumerate(_files(shapes)):
        name = file_name(number)
        chunks = {tensor: _chunks(shapes[tensor]) for tensor in names}
        announced = [(key(t, c.offset), dtype, c.size) for t, parts in chunks.items() for c in parts]
        with TensorFile(folder / name, announced) as file:
            for tensor, regions in chunks.items():
                tiling = tilings.setdefault(Tiling.of(regions, [name] * len(regions)), len(tilings))
                checksums = _append(file, next(tensors), regions)
                stored[tensor] = StoredTensor(dtype_name(dtype), shapes[tensor], tiling, tuple(checksums))
        files[name] = file.num_bytes
    text = json.dumps(state | {"save_number": 1}).encode()
    write_durably(folder / STATE, text)
    manifest = Manifest(
        files=files,
        state_crc32=crc32(text),
        attached=attach(folder, attached),
        tilings=list(tilings),
        tensors=stored,
    )
    write_manifest(folder, manifest)
    sync_folder(folder)
    return commit(root, iteration)


def _chunks(shape: tuple[int, ...]) -> list[Region]:
    return split(Region((0,) * len(shape), shape), CHUNK_BYTES // 4)


def _append(file: TensorFile, parts: Iterable[torch.Tensor], chunks: list[Region]) -> list[int]:
    """Write the chunks of a tensor, which comes as bands of its rows; returns their checksums."""
    checksums: list[int] = []
    for band in parts:
        at = 0
        while at < band.numel():
            chunk = chunks[len(checksums)]
            checksums.append(file.append([band.reshape(-1)[at : at + chunk.volume]]))
            at += chunk.volume
        del band
    assert len(checksums) == len(chunks), (len(checksums), len(chunks))
    return checksums


def _files(shapes: Mapping[str, tuple[int, ...]]) -> list[list[str]]:
    """Names of tensors, in order, by the file that holds them."""
    at, number, found = 0, 0, []
    for name, shape in shapes.items():
        size = 4 * torch.Size(shape).numel()
        if at and at + size > FILE_BYTES:
            at, number = 0, number + 1
        at += size
        found.append((number, name))
    return [[name for _, name in group] for _, group in groupby(found, key=lambda pair: pair[0])]
