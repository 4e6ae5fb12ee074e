"""Token files on disk, written: in constant memory, never seen half-written, and resumable at any commit."""

import os
import struct
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from megazero.data.about import Checksum, describe
from megazero.data.indexed import CHUNK, HEADER, MAGIC, TOKEN_TYPES, VERSION, Tokens
from megazero.files import OutputFile, sync_folder, write_atomically

Int32s = npt.NDArray[np.int32]
# In the order in which they get their names: an `.idx` is there last, and with it the corpus.
ENDS = (".bin", ".json", ".idx")


class CorpusParts:
    """The files of one corpus in the making: `stem.bin`, `stem.idx`, `stem.documents`, at last `stem.json`.

    After `commit()` these files and the state that it returned are enough to go on from there, whatever
    was written since: `CorpusParts(stem, dtype, state)` cuts it off. `finish` completes the index, `publish`
    gives the files their names. OSErrors name the file.
    """

    def __init__(
        self, stem: str | os.PathLike[str], dtype: npt.DTypeLike, state: Mapping[str, Any] | None = None
    ) -> None:
        self.stem, self.dtype = str(stem), np.dtype(dtype)
        self._code = {np.dtype(t): code for code, t in TOKEN_TYPES.items()}[self.dtype]
        found = state or {"num_documents": 0, "num_sequences": 0, "num_tokens": 0, "max_id": -1, "checksum": {}}
        self.num_documents: int = found["num_documents"]
        self.num_sequences: int = found["num_sequences"]
        self.num_tokens: int = found["num_tokens"]
        self.max_id: int = found["max_id"]
        self._checksum = Checksum(**found["checksum"])
        self._files: list[OutputFile] = []
        try:
            self._bin = self._open(".bin", self.num_tokens * self.dtype.itemsize)
            self._idx = self._open(".idx", HEADER.size + 4 * self.num_sequences if state else 0)
            self._documents = self._open(".documents", 8 * (self.num_documents + 1) if state else 0)
            if not state:
                self._idx.write(bytes(HEADER.size))  # the counts in it are known at the end
                self._documents.write(struct.pack("<q", 0))
        except BaseException:
            self.close()
            raise

    def _open(self, end: str, at: int) -> OutputFile:
        self._files.append(OutputFile(self.stem + end, at))
        return self._files[-1]

    def add(self, *sequences: npt.ArrayLike) -> None:
        """Append one document: one sequence of token ids, or several."""
        arrays = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
        for ids in arrays:
            self._write_sequences(ids, np.array([ids.size], dtype="<i4"))
        self._end_documents(np.array([self.num_sequences], dtype="<i8"))

    def add_batch(self, ids: Tokens, lengths: Int32s) -> None:
        """Append many one-sequence documents: their tokens one after another, and their lengths in tokens."""
        before = self.num_sequences
        self._write_sequences(ids, lengths.astype("<i4"))
        self._end_documents(np.arange(before + 1, self.num_sequences + 1, dtype="<i8"))

    def add_documents(self, ids: Tokens, lengths: Int32s, ends: npt.NDArray[np.int64]) -> None:
        """Append documents of any number of sequences: `ends` is the number of sequences here up to each's end."""
        before = self.num_sequences
        self._write_sequences(ids, lengths.astype("<i4"))
        self._end_documents((ends + before).astype("<i8"))

    def _write_sequences(self, ids: Tokens, lengths: npt.NDArray[Any]) -> None:
        assert ids.size == int(lengths.sum(dtype=np.int64)), (ids.size, lengths.sum())
        if ids.size:
            low, high = int(ids.min()), int(ids.max())
            limits = np.iinfo(self.dtype)
            if low < limits.min or high > limits.max:
                raise ValueError(
                    f"token ids {low} to {high} do not fit the {self.dtype.name} tokens of {self.stem}.bin; "
                    f"give a wider --dtype, or none: then the vocabulary decides"
                )
            self.max_id = max(self.max_id, high)
        raw = np.ascontiguousarray(ids, dtype=self.dtype.newbyteorder("<")).data.cast("B") if ids.size else b""
        self._bin.write(raw)
        self._checksum.update(raw)
        self._idx.write(lengths.tobytes())
        self.num_sequences += lengths.size
        self.num_tokens += ids.size

    def _end_documents(self, ends: npt.NDArray[Any]) -> None:
        self._documents.write(ends.tobytes())
        self.num_documents += ends.size

    def commit(self) -> dict[str, Any]:
        """Wait until all is on the disk; the state from which to go on, as JSON holds it."""
        for file in self._files:
            file.sync()
        return {
            "dtype": self.dtype.name,
            "num_documents": self.num_documents,
            "num_sequences": self.num_sequences,
            "num_tokens": self.num_tokens,
            "max_id": self.max_id,
            "checksum": {**vars(self._checksum), "blocks": list(self._checksum.blocks)},
        }

    def finish(self, about: Mapping[str, Any] | None) -> None:
        """Complete the index, and describe the corpus in `stem.json` if `about` is given."""
        self._finish_index()
        if about is not None:
            idx_checksum, at = Checksum(), 0
            while block := self._idx.read(CHUNK, at):
                idx_checksum.update(block)
                at += len(block)
            write_atomically(
                self.stem + ".json",
                describe(
                    about,
                    dtype=self.dtype.name,
                    num_documents=self.num_documents,
                    num_tokens=self.num_tokens,
                    max_id=self.max_id,
                    bin_checksum=self._checksum,
                    idx_checksum=idx_checksum,
                ),
            )
        for file in self._files:
            file.sync()

    def _finish_index(self) -> None:
        """Offsets and document indices follow the lengths; then the header, whose counts are known now."""
        end = 0  # bytes
        for at in range(0, self.num_sequences, CHUNK):
            count = min(CHUNK, self.num_sequences - at)
            sizes = np.frombuffer(self._idx.read(4 * count, HEADER.size + 4 * at), "<i4").astype(np.int64)
            sizes *= self.dtype.itemsize
            ends = end + np.cumsum(sizes)
            self._idx.write((ends - sizes).astype("<i8").tobytes())
            end = int(ends[-1])
        at = 0
        while block := self._documents.read(CHUNK, at):
            self._idx.write(block)
            at += len(block)
        self._idx.overwrite(HEADER.pack(MAGIC, VERSION, self._code, self.num_sequences, self.num_documents + 1), at=0)

    def close(self) -> None:
        """Close the files; the first error is raised once all are closed."""
        errors = []
        for file in self._files:
            try:
                file.close()
            except OSError as error:
                errors.append(error)
        self._files = []
        if errors:
            raise errors[0]

    def remove(self) -> None:
        """Close and delete the files, as far as there are any; errors are ignored."""
        with suppress(OSError):
            self.close()
        for end in (*ENDS, ".documents"):
            with suppress(OSError):
                os.unlink(self.stem + end)


def publish(stem: str, prefix: str) -> None:
    """Give the finished files of `stem` the names of the corpus `prefix`. Can be repeated after a kill.

    An older corpus of that name loses its index first, so that an old index is never beside new tokens.
    """
    if os.path.exists(stem + ".bin"):  # else an earlier attempt has come further than this
        for end in (".idx", ".json"):
            Path(prefix + end).unlink(missing_ok=True)
    for end in ENDS:
        if os.path.exists(stem + end):
            os.replace(stem + end, prefix + end)
    sync_folder(os.path.dirname(os.path.abspath(prefix)))
    Path(stem + ".documents").unlink(missing_ok=True)


class IndexedWriter(CorpusParts):
    """Writes a corpus in one go; a context manager.

    The files get their names only when the block ends without an exception: `.bin` first, then
    `prefix.json` (if `about` is given), `.idx` last. Until then there is no `.idx`, hence no corpus; an
    exception, that of a full disk too, leaves nothing behind.

    `about`, e.g. {"tokenizer": SPEC, "vocab_size": N}, goes to `prefix.json` together with what
    `about.describe` adds.
    """

    def __init__(
        self, prefix: str | os.PathLike[str], dtype: npt.DTypeLike, about: Mapping[str, Any] | None = None
    ) -> None:
        self.prefix = str(prefix)
        self._about = about
        os.makedirs(os.path.dirname(os.path.abspath(self.prefix)), exist_ok=True)
        # A name of its own for every writer: two at once cannot write into each other's files.
        self._files = []
        self.stem = f"{self.prefix}.partial-{uuid.uuid4().hex[:12]}"
        try:
            super().__init__(self.stem, dtype)
        except BaseException:
            self.remove()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.finish(self._about)
                self.close()
                publish(self.stem, self.prefix)
        finally:
            self.remove()
