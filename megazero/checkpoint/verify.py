"""Is a checkpoint whole? Every byte of it is read and checked, in one process and without a model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from megazero.checkpoint.manifest import Chunk, Damaged, missing_part, read_manifest, read_state
from megazero.checkpoint.storage import ManifestReader
from megazero.plan.layout.regions import coverage_fault


def faults(path: Path) -> Iterator[str]:
    """A sentence for everything that is wrong with the checkpoint folder `path`; none: it is whole."""
    path = Path(path)
    try:
        manifest = read_manifest(path)
        read_state(path)
    except ValueError as error:
        yield str(error)
        return
    missing = missing_part(path, manifest)
    if missing:
        yield f"--load {path} is not a whole checkpoint: {missing}"
    by_file: dict[str, list[tuple[str, Chunk]]] = defaultdict(list)
    for name, entry in manifest.tensors.items():
        fault = coverage_fault(entry.shape, [chunk.region for chunk in entry.chunks])
        if fault:
            yield f"tensor {name!r}: {fault}"
        for chunk in entry.chunks:
            by_file[chunk.file].append((name, chunk))
    reader = ManifestReader(path, manifest)
    for file, chunks in sorted(by_file.items()):
        try:
            with reader.open(file) as opened:
                for name, chunk in chunks:
                    yield from _chunk_faults(reader, opened, name, chunk)
        except Damaged as error:
            yield str(error)


def _chunk_faults(reader: ManifestReader, opened: object, name: str, chunk: Chunk) -> Iterator[str]:
    try:
        reader.read_chunk(opened, name, chunk)
    except Damaged as error:
        yield str(error)
    except SafetensorError as error:
        yield f"{chunk.file} is damaged: tensor {name!r}: {error}"
