"""Whole tensors of a checkpoint, read and written one at a time by one process, without a model."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from megazero.checkpoint.folders import commit, partial_folder
from megazero.checkpoint.manifest import (
    MANIFEST,
    STATE,
    Chunk,
    Entry,
    Manifest,
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
from megazero.checkpoint.shards import CHUNK_BYTES
from megazero.checkpoint.storage import ManifestReader
from megazero.checkpoint.tensor_file import TensorFile
from megazero.files import crc32, sync_folder
from megazero.plan.layout.regions import Region, coverage_fault, intersection, split

FILE_BYTES = 4 << 30  # of a file, unless a single tensor is larger
BAND_BYTES = 256 << 20  # of a band in fp32: of a large table that is in memory at once


def bands(shape: tuple[int, ...]) -> list[slice]:
    """Divide the rows of an fp32 tensor into bands of at most BAND_BYTES, each of whole chunks."""
    chunks = _chunks(shape)
    if not shape or any(chunk.size[1:] != shape[1:] for chunk in chunks):
        return [slice(None)]
    rows = chunks[0].size[0] * max(1, BAND_BYTES // CHUNK_BYTES)
    return [slice(at, min(at + rows, shape[0])) for at in range(0, shape[0], rows)]


class TensorReader:
    """The tensors of a checkpoint folder, each put together from its chunks when it is asked for."""

    def __init__(self, path: Path) -> None:
        """Damaged if the manifest is not whole."""
        self.path = path
        self.manifest = read_manifest(path)
        self._reader = ManifestReader(path, self.manifest)

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor, its checksums checked; it is all that stays in memory.

        Raises:
            Damaged: a file or the manifest is damaged.
        """
        return self.read_rows(name, slice(None))

    def read_rows(self, name: str, rows: slice) -> torch.Tensor:
        """A tensor's rows, of dim 0, like `read`. Chunks that hold other rows as well are read whole, one at a time."""
        entry = self.manifest.tensors[name]
        fault = coverage_fault(entry.shape, [chunk.region for chunk in entry.chunks])
        if fault:
            raise damage(self.path, MANIFEST, f"of tensor {name!r} {fault}")
        wanted = Region((0,) * len(entry.shape), entry.shape)
        if entry.shape:
            start, stop, _ = rows.indices(entry.shape[0])
            wanted = Region((start, *wanted.offset[1:]), (stop - start, *entry.shape[1:]))
        found = torch.empty(wanted.size, dtype=torch_dtype(entry.dtype))
        by_file: dict[str, list[tuple[Chunk, Region]]] = defaultdict(list)
        for chunk in entry.chunks:
            both = intersection(chunk.region, wanted)
            if both is not None:
                by_file[chunk.file].append((chunk, both))
        for file, chunks in by_file.items():
            with self._reader.open(file) as opened:  # closed at once: a map of it counts as memory
                for chunk, both in chunks:
                    data = self._reader.read_chunk(opened, name, chunk)
                    found[_within(both, wanted)] = data[_within(both, chunk.region)]
        return found


def _within(part: Region, whole: Region) -> tuple[slice, ...]:
    """Index of a part of a region in the region's data."""
    spans = zip(part.offset, whole.offset, part.size, strict=True)
    return tuple(slice(o - base, o - base + n) for o, base, n in spans)


def write_checkpoint(
    root: Path,
    iteration: int,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterator[Iterable[torch.Tensor]],
    state: Any,
    attached: Mapping[str, bytes],
) -> Path:
    """Write the fp32 checkpoint `root/iter_NNNNNNN` and point `root/latest` at it; returns its path.

    Args:
        shapes: of all tensors, by global name.
        tensors: yields them in that order, each as its `bands`, or as one; each is freed before the next is asked for.
        state: JSON.
        attached: files, as in `save`.
    """
    folder = partial_folder(root, iteration)
    folder.mkdir(parents=True)
    files: dict[str, int] = {}
    entries: dict[str, Entry] = {}
    for number, names in enumerate(_files(shapes)):
        name = file_name(number)
        chunks = {tensor: _chunks(shapes[tensor]) for tensor in names}
        announced = [(key(t, c.offset), torch.float32, c.size) for t, parts in chunks.items() for c in parts]
        file = TensorFile(folder / name, announced)
        try:
            for tensor in names:
                checksums = _append(file, next(tensors), chunks[tensor])
                stored = tuple(Chunk(c, name, crc) for c, crc in zip(chunks[tensor], checksums, strict=True))
                entries[tensor] = Entry.of(dtype_name(torch.float32), shapes[tensor], stored)
            file.sync()
        finally:
            file.close()
        files[name] = file.num_bytes
    text = json.dumps(state | {"save_number": 1}).encode()
    write_durably(folder / STATE, text)
    write_manifest(folder, Manifest(files, crc32(text), entries, attach(folder, attached)))
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
            checksums.append(file.append(band.reshape(-1)[at : at + chunk.volume].view(chunk.size)))
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
