"""Files of a save and of a load: `Save` writes a checkpoint, `ChunkReader` reads one. See Note [On disk]."""

import contextlib
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from megazero.checkpoint.folders import clear_leftovers, commit, next_save_number, partial_folder
from megazero.checkpoint.locking import owned
from megazero.checkpoint.manifest import (
    STATE,
    Damaged,
    Manifest,
    StoredChunk,
    attach,
    damage,
    key,
    missing_part,
    torch_dtype,
    write_durably,
    write_manifest,
)
from megazero.checkpoint.planning import RankPlan, Read, SaveLayout, Skipped, file_name, own_chunks, reads
from megazero.checkpoint.regions import Region
from megazero.checkpoint.shards import LocalShard, owned_regions, views_of
from megazero.checkpoint.tensor_file import host_bytes, write_safetensors
from megazero.files import crc32, make_folders, open_regular, sync_folder

# One thread reads a chunk from the disk while the other computes a checksum or copies.
READERS = 2


Target = tuple[tuple[slice, ...], torch.Tensor]  # a part of a chunk, and the memory to copy it to


class WrittenFile(NamedTuple):
    """The file that a rank has written, reported to rank 0 for the manifest."""

    file: str
    num_bytes: int
    crc32: list[int]  # of its chunks, in the order of `own_chunks`


class Save:
    """One rank's part of a save of `root/iter_NNNNNNN`. Rank 0 divides the work, and commits the files of all ranks.

    Attributes:
        folder: the partial folder, which `commit` renames.
    """

    def __init__(
        self,
        root: Path,
        iteration: int,
        rank: int,
        shards: Mapping[str, LocalShard],
        state: dict[str, Any],
        attached: Mapping[str, bytes],
    ) -> None:
        self.root, self.iteration, self.rank = root, iteration, rank
        self.shards, self.state, self.attached = shards, state, attached
        self.folder = partial_folder(root, iteration)

    def plan(self) -> RankPlan:
        self._plan = RankPlan.of(self.shards)
        return self._plan

    def divide(self, plans: list[RankPlan]) -> list[Skipped]:
        """Return the chunks that each rank leaves to another, and make the partial folder. On rank 0."""
        self._layout = SaveLayout(plans)
        number = self.state.get("save_number") or next_save_number(self.root)  # one in memory has the disk's
        numbered = self.state | {"save_number": number}
        self.state_text = json.dumps(numbered).encode()  # fails before any byte is written if it is not JSON
        self.make_folder()
        return self._layout.skipped

    def make_folder(self) -> None:
        make_folders(self.root)
        clear_leftovers(self.root)
        self.folder.mkdir()

    def write(self, skipped: Skipped) -> WrittenFile | None:
        """Write this rank's file, and wait until it is on the disk. None if the rank has nothing to write."""
        chunks = own_chunks(self._plan, self.shards, skipped)
        if not chunks:
            return None
        file = file_name(self.rank)
        with owned(self.root):
            if not self.folder.is_dir():
                raise FileNotFoundError(
                    f"{self.folder}, made by rank 0, is not here: --save must be a folder shared by all ranks"
                )
            checksums, num_bytes = write_safetensors(self.folder / file, chunks)
        return WrittenFile(file, num_bytes, list(checksums))

    def commit(self, written: Sequence[WrittenFile | None]) -> None:
        """Write the other files, and give the folder its final name. On rank 0."""
        with owned(self.root):
            manifest = self.manifest(written)
            write_durably(self.folder / STATE, self.state_text)
            fault = missing_part(self.folder, manifest)
            if fault:
                raise FileNotFoundError(f"{self.folder}: {fault}: --save must be a folder shared by all ranks")
            write_manifest(self.folder, manifest)
            sync_folder(self.folder)
            commit(self.root, self.iteration)

    def manifest(self, written: Sequence[WrittenFile | None]) -> Manifest:
        """Write the attached files, and return the manifest of all files. On rank 0."""
        tilings, tensors = self._layout.stored([each.crc32 if each else () for each in written])
        return Manifest(
            files={each.file: each.num_bytes for each in written if each},
            state_crc32=crc32(self.state_text),
            attached=attach(self.folder, self.attached),
            tilings=tilings,
            tensors=tensors,
        )


class ChunkReader:
    """Reads a committed checkpoint: only the chunks that are needed, by memory map, each with its checksum checked."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

    def fill(self, shards: Mapping[str, LocalShard]) -> None:
        """Fill the `data` of every shard, in place. Damaged, naming file and tensor, at the first damaged chunk."""
        for file, chunks in sorted(self.plan(shards).items()):
            with self.open(file) as opened, ThreadPoolExecutor(READERS, "load") as pool:

                def copy(chunk: tuple[str, StoredChunk], targets: list[Target], opened: Any = opened) -> None:
                    data = self.read_chunk(opened, *chunk)
                    for part, target in targets:
                        target.copy_(data[part])

                for _ in pool.map(copy, chunks, chunks.values()):
                    pass  # raises the exception of a thread

    def plan(self, shards: Mapping[str, LocalShard]) -> dict[str, dict[tuple[str, StoredChunk], list[Target]]]:
        """Return, by file and by (tensor, chunk), the parts of chunks to copy and their targets."""
        planned: dict[tuple[object, ...], tuple[list[Region], list[Read]]] = {}
        wanted: dict[str, dict[tuple[str, StoredChunk], list[Target]]] = defaultdict(lambda: defaultdict(list))
        for name, shard in shards.items():
            tiling, checksums = self.manifest.tiling(name), self.manifest.tensors[name].crc32
            kind = tiling.offset, tiling.size, *shard.geometry
            if kind not in planned:
                regions = owned_regions(shard)
                planned[kind] = regions, reads(tiling, regions)
            regions, parts = planned[kind]
            views = list(views_of(shard, regions))
            for part in parts:
                at = part.chunk
                chunk = StoredChunk(tiling.regions[at], tiling.file[at], checksums[at])
                wanted[chunk.file][name, chunk].append((part.part, views[part.region][part.place]))
        return wanted

    @contextlib.contextmanager
    def open(self, file: str) -> Iterator[Any]:
        """Open a tensor file for `read_chunk` within the block. Damaged if it cannot be opened or read."""
        path = self.path / file
        try:
            os.close(open_regular(path))  # the library would wait for the writer of a FIFO
            with safe_open(path, "pt") as opened:
                yield opened
        except Damaged:
            raise
        except (SafetensorError, OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise damage(self.path, file, reason) from None
        except RuntimeError as error:
            if path.exists():
                raise
            raise damage(self.path, file, f"it is gone ({error})") from None  # deleted while torch mapped it

    def read_chunk(self, opened: Any, name: str, chunk: StoredChunk) -> torch.Tensor:
        """Return the chunk's elements, a view of the file; Damaged unless shape, dtype and checksum are right."""
        expected = (torch_dtype(self.manifest.tensors[name].dtype), chunk.region.size)
        where = f"tensor {name!r} at {list(chunk.region.offset)}"
        try:
            tensor: torch.Tensor = opened.get_tensor(key(name, chunk.region.offset))
        except SafetensorError as error:
            raise damage(self.path, chunk.file, f"{where}: {error}") from None
        if (tensor.dtype, tuple(tensor.shape)) != expected:
            raise damage(self.path, chunk.file, f"{where} has another shape or dtype than in the manifest")
        if crc32(host_bytes(tensor)) != chunk.crc32:
            raise damage(self.path, chunk.file, f"{where} does not match its checksum")
        return tensor
