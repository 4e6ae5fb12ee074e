"""Read and check every byte of a checkpoint, in one process and without a model."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from megazero.checkpoint.manifest import Damaged, StoredChunk, missing_part, read_manifest, read_state_file
from megazero.checkpoint.regions import coverage_fault
from megazero.checkpoint.storage import ChunkReader


def faults(path: Path) -> Iterator[str]:
    """Yield a sentence for each fault of the checkpoint folder `path`."""
    path = Path(path)
    try:
        manifest = read_manifest(path)
        read_state_file(path)
    except ValueError as error:
        yield str(error)
        return
    missing = missing_part(path, manifest)
    if missing:
        yield f"--load {path} is not a whole checkpoint: {missing}"
    by_file: dict[str, list[tuple[str, StoredChunk]]] = defaultdict(list)
    for name, tensor in manifest.tensors.items():
        fault = coverage_fault(tensor.shape, manifest.tiling(name).regions)
        if fault:
            yield f"tensor {name!r}: {fault}"
        for chunk in manifest.chunks(name):
            by_file[chunk.file].append((name, chunk))
    reader = ChunkReader(path, manifest)
    for file, chunks in sorted(by_file.items()):
        try:
            with reader.open(file) as opened:
                for name, chunk in chunks:
                    try:
                        reader.read_chunk(opened, name, chunk)
                    except Damaged as error:
                        yield str(error)
        except Damaged as error:
            yield str(error)
