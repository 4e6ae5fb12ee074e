"""Files of a checkpoint in memory as bytes that ranks send each other: whole files in pieces, or chunks of them."""

import contextlib
import mmap
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import torch

from megazero.checkpoint.manifest import Damaged, StoredChunk
from megazero.checkpoint.storage import ChunkReader, Target
from megazero.checkpoint.tensor_file import host_bytes
from megazero.files import OutputFile

PIECE_BYTES = 16 << 20  # of a file, sent at once

Asked = list[tuple[str, StoredChunk]]
Wanted = tuple[tuple[str, StoredChunk], list[Target]]


def file_pieces(path: Path) -> Sequence[torch.Tensor]:
    """Return the pieces of a file, without a copy; none if there is no file, because the rank wrote nothing."""
    if not path.exists():
        return ()
    with open(path, "rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    pieces: Sequence[torch.Tensor] = torch.frombuffer(content, dtype=torch.uint8).split(PIECE_BYTES)
    return pieces


def write_pieces(path: Path, pieces: Iterable[torch.Tensor]) -> OSError | None:
    """Write a file of pieces, and take all of them even if that fails; return the error."""
    file = failure = None
    for piece in pieces:
        try:
            if failure is None:
                file = file or OutputFile(path)
                file.write(host_bytes(piece))
        except OSError as error:
            failure = error
    if file is not None:
        file.close()
    return failure


def chunk_bytes(reader: ChunkReader, chunks: Asked) -> Iterator[torch.Tensor]:
    """Yield the bytes of chunks of this node's files, ordered by file; none for one that is damaged."""
    for file, of_file in groupby(chunks, key=lambda each: each[1].file):
        with contextlib.ExitStack() as stack:
            opened = None
            with contextlib.suppress(Damaged):
                opened = stack.enter_context(reader.open(file))
            for name, chunk in of_file:
                data = torch.empty(0)
                if opened is not None:
                    with contextlib.suppress(Damaged):
                        data = reader.read_chunk(opened, name, chunk)
                yield data.reshape(-1).view(torch.uint8)


def copy_chunks(wanted: Sequence[Wanted], found: Iterable[torch.Tensor]) -> list[Wanted]:
    """Copy the bytes of chunks to their targets; return the chunks that were damaged."""
    left = []
    for each, data in zip(wanted, found, strict=True):  # strict: runs `exchange` to its end, which sends the rest
        (_, chunk), targets = each
        if not len(data):
            left.append(each)
            continue
        for part, target in targets:
            target.copy_(data.view(target.dtype).view(chunk.region.size)[part])
    return left
