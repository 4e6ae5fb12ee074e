"""Token files on disk, written: in constant memory, never seen half-written, and resumable at any commit."""

import os
import struct
import uuid
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from megazero.data.about import Checksum, describe
from megazero.data.indexed import CHUNK, HEADER, MAGIC, TOKEN_TYPES, VERSION, Int64s, Mask, Tokens
from megazero.files import OutputFile, sync_folder, write_atomically

# In the order in which they get their names: the `.idx` last, because it makes the files a corpus.
ENDS = (".bin", ".mask", ".json", ".idx")


class CorpusParts:
    """The files of an unfinished corpus: `stem.bin`, `stem.idx`, `stem.documents`, at last `stem.json`.

    If `masked`, also `stem.mask`, a byte per token: 1 if the token counts as a target, else 0.

    Writing resumes from a commit: `CorpusParts(stem, dtype, state)` with the state that `commit()` returned truncates
    the files there. `finish` completes the index, `publish` gives the files their names. OSErrors name the file.
    """

    def __init__(
        self,
        stem: str | os.PathLike[str],
        dtype: npt.DTypeLike,
        state: Mapping[str, Any] | None = None,
        *,
        masked: bool = False,
    ) -> None:
        self.stem, self.dtype = str(stem), np.dtype(dtype)
        found = state or {"num_documents": 0, "num_sequences": 0, "num_tokens": 0, "max_id": -1, "checksum": {}}
        mask = found.get("mask", {"num_targets": 0, "checksum": {}})
        self.num_documents: int = found["num_documents"]
        self.num_sequences: int = found["num_sequences"]
        self.num_tokens: int = found["num_tokens"]
        self.max_id: int = found["max_id"]
        self.num_targets: int = mask["num_targets"]
        self._checksum, self._mask_checksum = Checksum(**found["checksum"]), Checksum(**mask["checksum"])
        self._files: list[OutputFile] = []
        try:
            self._bin = self._open(".bin", self.num_tokens * self.dtype.itemsize)
            self._mask = self._open(".mask", self.num_tokens) if masked else None
            self._idx = self._open(".idx", HEADER.size + 4 * self.num_sequences if state else 0)
            self._documents = self._open(".documents", 8 * (self.num_documents + 1) if state else 0)
            if not state:
                self._idx.write(bytes(HEADER.size))  # `finish` writes its counts
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
        lengths = np.array([ids.size for ids in arrays], dtype=np.int64)
        self.add_documents(np.concatenate([np.zeros(0, np.int64), *arrays]), lengths, np.array([len(arrays)]))

    def add_documents(
        self, ids: Tokens, lengths: npt.NDArray[Any], ends: Int64s | None = None, mask: Mask | None = None
    ) -> None:
        """Append documents.

        Args:
            ids: their tokens, one document after another.
            lengths: tokens of each sequence.
            ends: number of sequences up to the end of each document; None: each document is one sequence.
            mask: whether each token counts as a target; None if the corpus is not masked.
        """
        assert (mask is None) == (self._mask is None), self.stem
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
            raw = np.ascontiguousarray(ids, dtype=self.dtype.newbyteorder("<")).data.cast("B")
            self._bin.write(raw)
            self._checksum.update(raw)
        if self._mask is not None and mask is not None:
            assert mask.shape == ids.shape, (mask.shape, ids.shape)
            marks = mask.astype(np.uint8).data
            self._mask.write(marks)
            self._mask_checksum.update(marks)
            self.num_targets += int(mask.sum())
        ends = np.arange(1, lengths.size + 1) if ends is None else ends
        self._idx.write(lengths.astype("<i4").tobytes())
        self._documents.write((ends + self.num_sequences).astype("<i8").tobytes())
        self.num_tokens += ids.size
        self.num_sequences += lengths.size
        self.num_documents += ends.size

    def commit(self) -> dict[str, Any]:
        """Flush the files to the disk and return the state from which writing can resume, as JSON holds it."""
        for file in self._files:
            file.sync()
        masked = self._mask is not None
        return {
            "dtype": self.dtype.name,
            "num_documents": self.num_documents,
            "num_sequences": self.num_sequences,
            "num_tokens": self.num_tokens,
            "max_id": self.max_id,
            "checksum": asdict(self._checksum),
            **({"mask": {"num_targets": self.num_targets, "checksum": asdict(self._mask_checksum)}} if masked else {}),
        }

    def finish(self, about: Mapping[str, Any] | None) -> None:
        """Complete the index, and describe the corpus in `stem.json` if `about` is given."""
        self._finish_index()
        if about is not None:
            idx_checksum = Checksum()
            for at in range(0, self._idx.size, CHUNK):
                idx_checksum.update(self._idx.read(CHUNK, at))
            counts = {
                "dtype": self.dtype.name,
                "num_documents": self.num_documents,
                "num_tokens": self.num_tokens,
                "max_id": self.max_id,
            }
            checksums = {"bin": self._checksum, "idx": idx_checksum}
            if self._mask is not None:
                counts["num_targets"], checksums["mask"] = self.num_targets, self._mask_checksum
            write_atomically(self.stem + ".json", describe(about, counts, checksums))
        for file in self._files:
            file.sync()

    def _finish_index(self) -> None:
        """Append offsets and document indices to the lengths; then write the header with the counts."""
        end = 0  # bytes
        for at in range(0, self.num_sequences, CHUNK):
            count = min(CHUNK, self.num_sequences - at)
            sizes = np.frombuffer(self._idx.read(4 * count, HEADER.size + 4 * at), "<i4").astype(np.int64)
            sizes *= self.dtype.itemsize
            ends = end + np.cumsum(sizes)
            self._idx.write((ends - sizes).astype("<i8").tobytes())
            end = int(ends[-1])
        for at in range(0, self._documents.size, CHUNK):
            self._idx.write(self._documents.read(CHUNK, at))
        code = {np.dtype(kind): code for code, kind in TOKEN_TYPES.items()}[self.dtype]
        self._idx.overwrite(HEADER.pack(MAGIC, VERSION, code, self.num_sequences, self.num_documents + 1), at=0)

    def close(self) -> None:
        """Close all files, and raise an error of any."""
        with ExitStack() as stack:
            for file in self._files:
                stack.callback(file.close)
            self._files = []

    def remove(self) -> None:
        """Close and delete the files that exist; errors are ignored."""
        with suppress(OSError):
            self.close()
        for end in (*ENDS, ".documents"):
            with suppress(OSError):
                os.unlink(self.stem + end)


def publish(stem: str, prefix: str) -> None:
    """Give the finished files of `stem` the names of the corpus `prefix`. Can be repeated after a kill.

    An older corpus of that name loses its index first, so that an old index is never next to new tokens.
    """
    if os.path.exists(stem + ".bin"):  # else an earlier call has already renamed it
        for end in (".idx", ".json", ".mask"):
            Path(prefix + end).unlink(missing_ok=True)
    for end in ENDS:
        if os.path.exists(stem + end):
            os.replace(stem + end, prefix + end)
    sync_folder(os.path.dirname(os.path.abspath(prefix)))
    Path(stem + ".documents").unlink(missing_ok=True)


class IndexedWriter(CorpusParts):
    """Writes a corpus in one pass; a context manager.

    The files get their names only if the block ends without an exception: `.bin` first, then `.mask` (if `masked`),
    `prefix.json` (if `about` is given), `.idx` last. Without the `.idx` there is no corpus. An exception, also that of
    a full disk, leaves nothing behind.

    `about`, e.g. {"tokenizer": SPEC, "vocab_size": N}, goes to `prefix.json` with the counts and checksums.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        dtype: npt.DTypeLike,
        about: Mapping[str, Any] | None = None,
        *,
        masked: bool = False,
    ) -> None:
        self.prefix, self._about = str(prefix), about
        os.makedirs(os.path.dirname(os.path.abspath(self.prefix)), exist_ok=True)
        # Each writer has its own name, so that two cannot write into each other's files.
        self.stem = f"{self.prefix}.partial-{uuid.uuid4().hex[:12]}"
        try:
            super().__init__(self.stem, dtype, masked=masked)
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
