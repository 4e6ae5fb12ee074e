"""Whole tensors of a checkpoint, read and written one at a time by one process, without a model."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from isal.isal_zlib import crc32
from safetensors import SafetensorError, safe_open

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
from megazero.files import open_regular, sync_folder
from megazero.plan.regions import Region, coverage_fault, split

FILE_BYTES = 4 << 30  # of a file, unless a single tensor is larger


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
        entry = self.manifest.tensors[name]
        fault = coverage_fault(entry.shape, [chunk.region for chunk in entry.chunks])
        if fault:
            raise damage(self.path, MANIFEST, f"of tensor {name!r} {fault}")
        whole = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype))
        by_file: dict[str, list[Chunk]] = defaultdict(list)
        for chunk in entry.chunks:
            by_file[chunk.file].append(chunk)
        for file, chunks in by_file.items():
            try:
                os.close(open_regular(self.path / file))
                with safe_open(self.path / file, "pt") as opened:  # closed at once: a map of it counts as memory
                    for chunk in chunks:
                        found = self._reader.read_chunk(opened, name, chunk)
                        spans = zip(chunk.region.offset, chunk.region.size, strict=True)
                        whole[tuple(slice(o, o + n) for o, n in spans)] = found
            except (SafetensorError, OSError) as error:
                raise damage(self.path, file, f"{error}") from None
        return whole


def write_checkpoint(
    root: Path,
    iteration: int,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Iterator[torch.Tensor],
    state: Any,
    attached: Mapping[str, bytes],
) -> Path:
    """Write the fp32 checkpoint `root/iter_NNNNNNN` and point `root/latest` at it; returns its path.

    Args:
        shapes: of all tensors, by global name.
        tensors: yields them in that order; each is freed before the next is asked for.
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
                data = next(tensors)
                assert (data.dtype, tuple(data.shape)) == (torch.float32, shapes[tensor]), (tensor, data.shape)
                checksums = _append(file, data, chunks[tensor])
                del data
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


def _append(file: TensorFile, data: torch.Tensor, chunks: list[Region]) -> list[int]:
    """Write a tensor's chunks; returns their checksums."""
    parts = data.reshape(-1).split([chunk.volume for chunk in chunks])
    return [file.append(part.view(chunk.size)) for part, chunk in zip(parts, chunks, strict=True)]


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
