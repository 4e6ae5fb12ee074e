"""Tensors on disk for torch.distributed.checkpoint: safetensors files and the manifest. See Note [On disk]."""

import contextlib
import json
import os
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from megazero.checkpoint.folders import clear_leftovers, commit, next_save_number, partial_folder
from megazero.checkpoint.manifest import (
    STATE,
    Chunk,
    Damaged,
    Manifest,
    attach,
    damage,
    key,
    missing_part,
    refusal,
    torch_dtype,
    write_durably,
    write_manifest,
)
from megazero.checkpoint.planning import CoveredSavePlanner, file_name
from megazero.checkpoint.tensor_file import host_bytes, write_safetensors
from megazero.files import crc32, open_regular, sync_folder

# A thread's chunk is read from the disk while another's checksum is computed, or it is copied.
READERS = 2


@dataclass(frozen=True)
class WrittenFile:
    """The file that a rank has written, reported to rank 0 for the manifest."""

    file: str
    file_bytes: int
    crc32: array  # of its chunks, in the order of `planning.written`


class ManifestWriter(StorageWriter):
    """Writes `root/iter_NNNNNNN`: each rank its chunks, rank 0 the rest, and commits it once all is on
    the disk.

    DCP calls `finish` on rank 0 only after every rank has reported that `write_data` succeeded, and reports
    its outcome to every rank: so a failure anywhere commits nothing, and is known everywhere.
    """

    def __init__(
        self,
        root: Path,
        iteration: int,
        rank: int,
        state: dict[str, Any],
        planner: CoveredSavePlanner,
        attached: Mapping[str, bytes],
    ) -> None:
        self.planner = planner
        self.root = root
        self.iteration = iteration
        self.rank = rank
        self.state = state
        self.attached = attached
        self.folder = partial_folder(root, iteration)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing: a writer serves one save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Rank 0 makes the partial folder; no rank writes before plans were exchanged, so after this."""
        if is_coordinator:
            numbered = self.state | {"save_number": next_save_number(self.root)}
            self.state_text = json.dumps(numbered).encode()  # before any byte is written: it may not be JSON
            self.root.mkdir(parents=True, exist_ok=True)
            clear_leftovers(self.root)
            self.folder.mkdir()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Unchanged."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """This rank's file, on the disk when this returns; no file where the rank has nothing to write."""
        if not plan.items:
            return _done([])
        with _sendable_errors():
            if not self.folder.is_dir():
                raise FileNotFoundError(
                    f"{self.folder}, made by rank 0, is not here: --save must be a folder shared by all ranks"
                )
            file = file_name(self.rank)
            chunks = [(key(i.index.fqn, i.index.offset), planner.resolve_data(i)) for i in plan.items]
            checksums, file_bytes = write_safetensors(self.folder / file, chunks)
        stored = WrittenFile(file, file_bytes, array("I", checksums))
        return _done([WriteResult(MetadataIndex(file), file_bytes, stored)])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0: state, manifest, and then the name by which others see the checkpoint."""
        assert self.planner.layout is not None, "only rank 0 commits"
        stored: list[WrittenFile | None] = [rank[0].storage_data if rank else None for rank in results]
        tensors = self.planner.layout.entries([each.crc32 if each else () for each in stored])
        files = {each.file: each.file_bytes for each in stored if each}
        attached = attach(self.folder, self.attached)
        manifest = Manifest(files, crc32(self.state_text), tensors, attached)
        write_durably(self.folder / STATE, self.state_text)
        fault = missing_part(self.folder, manifest)
        if fault:
            raise FileNotFoundError(f"{self.folder}: {fault}: --save must be a folder shared by all ranks")
        write_manifest(self.folder, manifest)
        sync_folder(self.folder)
        commit(self.root, self.iteration)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Not chosen by name."""
        return False


class ManifestReader(StorageReader):
    """Reads a committed checkpoint: only the chunks that are needed, each checked, by memory map."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing: a reader serves one load."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Nothing of the manifest: the planner has it. Not empty, which DCP takes for a failure."""
        return Metadata({})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors; ValueError, naming file and tensor, at the first damaged chunk."""
        by_file: dict[str, dict[MetadataIndex, list[ReadItem]]] = defaultdict(lambda: defaultdict(list))
        for item in plan.items:
            index = item.storage_index
            by_file[self.manifest.tensors[index.fqn].tiling.files[index.index]][index].append(item)
        for file, wanted in sorted(by_file.items()):
            with self.open(file) as opened, _sendable_errors(), ThreadPoolExecutor(READERS, "load") as pool:

                def read(index: MetadataIndex, items: list[ReadItem], opened: Any = opened) -> None:
                    _fill(items, self.read_chunk(opened, index.fqn, self._chunk(index)), planner)

                for _ in pool.map(read, wanted, wanted.values()):
                    pass  # raises what a thread has raised
        return _done(None)

    @contextlib.contextmanager
    def open(self, file: str) -> Iterator[Any]:
        """Open a tensor file for `read_chunk` within the block. Raise Damaged if it cannot be read, here or there."""
        path = self.path / file
        try:
            os.close(open_regular(path, follow=False))  # a FIFO would hang the library
            with safe_open(path, "pt") as opened:
                yield opened
        except Damaged:
            raise
        except (SafetensorError, OSError, ValueError) as error:
            reason = refusal(error) if isinstance(error, OSError) else str(error)
            raise damage(self.path, file, reason) from None
        except RuntimeError as error:
            if path.exists():
                raise
            raise damage(self.path, file, f"it is gone ({error})") from None  # deleted while torch mapped it

    def _chunk(self, index: MetadataIndex) -> Chunk:
        entry = self.manifest.tensors[index.fqn]
        return Chunk(entry.tiling.regions[index.index], entry.tiling.files[index.index], entry.crc32[index.index])

    def read_chunk(self, opened: Any, name: str, chunk: Chunk) -> torch.Tensor:
        """The chunk's elements, a view of the file, after its checksum was found right."""
        tensor = opened.get_tensor(key(name, chunk.region.offset))
        expected = (torch_dtype(self.manifest.tensors[name].dtype), chunk.region.size)
        where = f"tensor {name!r} at {list(chunk.region.offset)}"
        if (tensor.dtype, tuple(tensor.shape)) != expected:
            raise damage(self.path, chunk.file, f"{where} has another shape or dtype than the manifest says")
        if crc32(host_bytes(tensor)) != chunk.crc32:
            raise damage(self.path, chunk.file, f"{where} does not have the checksum that the manifest says")
        return tensor

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Not chosen by name."""
        return False


def _fill(items: Iterable[ReadItem], chunk: torch.Tensor, planner: LoadPlanner) -> None:
    for item in items:
        spans = zip(item.storage_offsets, item.lengths, strict=True)
        part = chunk[tuple(slice(offset, offset + length) for offset, length in spans)]
        target = planner.resolve_tensor(item)
        target.copy_(part)
        planner.commit_tensor(item, target)


@contextlib.contextmanager
def _sendable_errors() -> Iterator[None]:
    """DCP pickles what a rank raised, to tell the others; what cannot be pickled would leave them waiting."""
    try:
        yield
    except (OSError, ValueError, SafetensorError):
        raise
    except Exception as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
