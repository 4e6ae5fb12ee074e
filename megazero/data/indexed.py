"""Token files on disk: Megatron's `.bin`/`.idx` pair, memory-mapped, and never seen half-written.

`PREFIX.bin` is the tokens, nothing else. `PREFIX.idx` is little-endian and unaligned:

    9 bytes  magic "MMIDIDX\\0\\0"
    u64      version, 1
    u8       code of the token type (see `DTYPES`)
    u64      S, the number of sequences
    u64      D, the number of document indices: documents + 1
    S x i32  sequence lengths, in tokens
    S x i64  sequence offsets into `.bin`, in bytes
    D x i64  document indices: document d is the sequences [index[d], index[d + 1])
    S x i8   sequence modes, only in multimodal files; accepted and ignored

Sequences follow each other in `.bin` without gaps, so a document is one range of tokens.
"""

import json
import os
import struct
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

MAGIC = b"MMIDIDX\0\0"
LEGACY_MAGIC = b"TNTIDX\0\0"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
# Codes 6 and 7 mean float64/float32 in one fork and float32/float64 in another; neither can hold token ids.
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
# Sequences (or bytes) handled at once when tables are checked or copied: bounds memory.
CHUNK = 1 << 20

Tokens = npt.NDArray[Any]
Int64s = npt.NDArray[np.int64]


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """The token type that Megatron picks for a vocabulary: uint16 below 65500 ids, else int32."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


class IndexedDataset:
    """The corpus `prefix.bin` + `prefix.idx`, memory-mapped, checked in full when opened.

    Attributes: `dtype` of a token; `lengths` int32 [S], tokens per sequence; `offsets` int64 [S], bytes;
    `document_indices` int64 [D]; `num_documents` = D - 1; `num_tokens` in the whole file.

    Raises ValueError naming --data-path if a file is missing, truncated, of another format or inconsistent.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = str(prefix)
        require_pair(self.prefix)
        self._map_index()
        self._check_sequences()
        self._check_documents()
        self._map_tokens()

    def __reduce__(self) -> tuple[type["IndexedDataset"], tuple[str]]:
        # Pickling a memory map would copy the corpus: a worker process opens the files again instead.
        return IndexedDataset, (self.prefix,)

    def tokens(self, start: int, stop: int) -> Tokens:
        """Tokens [start, stop) of the whole file, a read-only view of type `dtype`."""
        assert 0 <= start <= stop <= self.num_tokens, (start, stop, self.num_tokens)
        return self._tokens[start:stop]

    def document(self, index: int) -> Tokens:
        """All tokens of one document, a read-only view."""
        assert 0 <= index < self.num_documents, (index, self.num_documents)
        start, stop = self.document_starts(index, index + 2)
        return self._tokens[start:stop]

    def document_starts(self, first: int, stop: int) -> Int64s:
        """First token of each document in [first, stop), int64; one past the last starts at the end."""
        bounds = np.asarray(self.document_indices[first:stop])
        starts = np.full(bounds.shape, self.num_tokens, dtype=np.int64)
        inside = bounds < self.lengths.shape[0]
        starts[inside] = self.offsets[bounds[inside]] // self.dtype.itemsize
        return starts

    def _map_index(self) -> None:
        """Read the header and map the three tables."""
        path = self.prefix + ".idx"
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            head = file.read(HEADER.size)
        code, num_sequences, num_indices = parse_header(head, self.prefix)
        self.dtype: np.dtype[Any] = np.dtype(DTYPES[code])
        expected = HEADER.size + 12 * num_sequences + 8 * num_indices
        if size < expected:
            raise ValueError(
                f"--data-path {self.prefix}: {path} is truncated: {size} bytes, its header promises "
                f"{expected}; copy it again or rerun data_tools/preprocess_data.py"
            )
        if size not in (expected, expected + num_sequences):  # with a byte per sequence: a multimodal file
            raise ValueError(
                f"--data-path {self.prefix}: {path} is {size} bytes long, its header promises {expected}; "
                f"it is damaged: copy it again or rerun data_tools/preprocess_data.py"
            )
        raw = np.memmap(path, dtype=np.uint8, mode="r")

        def table(dtype: str, count: int, at: int) -> npt.NDArray[Any]:
            return np.frombuffer(raw, dtype=dtype, count=count, offset=at)

        self.lengths: npt.NDArray[np.int32] = table("<i4", num_sequences, HEADER.size)
        self.offsets: Int64s = table("<i8", num_sequences, HEADER.size + 4 * num_sequences)
        self.document_indices: Int64s = table("<i8", num_indices, HEADER.size + 12 * num_sequences)
        self.num_documents = num_indices - 1

    def _check_sequences(self) -> None:
        """Every sequence must begin where the one before it ended; sets `num_tokens`."""
        end = 0  # bytes
        for at in range(0, self.lengths.shape[0], CHUNK):
            lengths = self.lengths[at : at + CHUNK].astype(np.int64)
            ends = end + np.cumsum(lengths * self.dtype.itemsize)
            bad = lengths < 0
            bad |= self.offsets[at : at + CHUNK] != ends - lengths * self.dtype.itemsize
            if bad.any():
                i = at + int(bad.argmax())
                raise ValueError(
                    f"--data-path {self.prefix}: {self.prefix}.idx is inconsistent at sequence {i}: "
                    f"length {self.lengths[i]}, offset {self.offsets[i]}; every sequence must begin "
                    f"where the one before ends. Rerun data_tools/preprocess_data.py"
                )
            end = int(ends[-1])
        self.num_tokens = end // self.dtype.itemsize

    def _check_documents(self) -> None:
        """Document indices rise from 0 to S. Equal neighbours are empty documents, which Megatron writes."""
        num_sequences = self.lengths.shape[0]
        indices = self.document_indices
        whole = indices.shape[0] > 0 and indices[0] == 0 and indices[-1] == num_sequences
        for at in range(0, indices.shape[0], CHUNK):
            part = indices[at : at + CHUNK + 1]  # one over, so that the chunks' borders are compared too
            whole = whole and bool((part[1:] >= part[:-1]).all())
        if not whole:
            raise ValueError(
                f"--data-path {self.prefix}: the document indices in {self.prefix}.idx do not rise from 0 to "
                f"the {num_sequences} sequences; it is damaged: rerun data_tools/preprocess_data.py"
            )

    def _map_tokens(self) -> None:
        path = self.prefix + ".bin"
        size, expected = os.path.getsize(path), self.num_tokens * self.dtype.itemsize
        if size != expected:
            what = "is truncated" if size < expected else "does not belong to this .idx"
            raise ValueError(
                f"--data-path {self.prefix}: {path} {what}: {size} bytes, the index describes {expected}; "
                f"copy both files again or rerun data_tools/preprocess_data.py"
            )
        # An empty file cannot be mapped.
        self._tokens: Tokens = (
            np.frombuffer(np.memmap(path, dtype=np.uint8, mode="r"), dtype=self.dtype.newbyteorder("<"))
            if size
            else np.empty(0, self.dtype)
        )


def require_pair(prefix: str) -> None:
    """ValueError naming --data-path unless both files of `prefix` exist."""
    missing = [prefix + end for end in (".bin", ".idx") if not os.path.isfile(prefix + end)]
    if not missing:
        return
    stem, end = os.path.splitext(prefix)
    if end in (".bin", ".idx") and os.path.isfile(stem + end):
        raise ValueError(f"--data-path {prefix}: give the prefix without {end}: {stem}")
    raise ValueError(
        f"--data-path {prefix}: {' and '.join(missing)} not found; give the prefix that "
        f"data_tools/preprocess_data.py printed, without .bin or .idx"
    )


def parse_header(head: bytes, prefix: str) -> tuple[int, int, int]:
    """(dtype code, S, D) from the first bytes of an .idx. ValueError for any other format."""
    path = prefix + ".idx"
    if head.startswith(LEGACY_MAGIC):
        raise ValueError(
            f"--data-path {prefix}: {path} is in the legacy TNTIDX format of fairseq and old Megatron-LM; "
            f"preprocess the text again with data_tools/preprocess_data.py"
        )
    if head[: len(MAGIC)] != MAGIC[: len(head)] or not head:
        raise ValueError(
            f"--data-path {prefix}: {path} is no Megatron index (it begins with {head[:9]!r}, not "
            f"{MAGIC!r}); make one with data_tools/preprocess_data.py"
        )
    if len(head) < HEADER.size:
        raise ValueError(
            f"--data-path {prefix}: {path} is truncated: {len(head)} bytes, a header alone takes "
            f"{HEADER.size}; copy it again or rerun data_tools/preprocess_data.py"
        )
    _, version, code, num_sequences, num_indices = HEADER.unpack(head)
    if version != VERSION:
        raise ValueError(
            f"--data-path {prefix}: {path} has index version {version}, only {VERSION} is known; "
            f"preprocess the text again with data_tools/preprocess_data.py"
        )
    if code not in DTYPES:
        why = "float32 in one fork, float64 in another" if code in (6, 7) else "which is unknown"
        raise ValueError(
            f"--data-path {prefix}: {path} has token type code {code}, {why}; token ids are stored as one of "
            f"{', '.join(f'{c} ({np.dtype(t).name})' for c, t in DTYPES.items())}: preprocess the text again"
        )
    return code, num_sequences, num_indices


class IndexedWriter:
    """Writes a corpus in constant memory; a context manager.

    The files get their names only when the block ends without an exception: `.bin` first, then
    `prefix.json` (if `about` is given), `.idx` last. Until then, and after an exception, there is no
    `.idx`, hence no corpus; the index of an older corpus of the same name is removed before its `.bin` is
    replaced.

    `about`, e.g. {"tokenizer": SPEC, "vocab_size": N}, goes to `prefix.json` together with dtype,
    num_documents, num_tokens and max_id.
    """

    def __init__(
        self, prefix: str | os.PathLike[str], dtype: npt.DTypeLike, about: Mapping[str, Any] | None = None
    ) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype)
        self._code = {np.dtype(t): code for code, t in DTYPES.items()}[self.dtype]
        self._about = about
        self.num_documents = self.num_sequences = self.num_tokens = 0
        self.max_id = -1

    def __enter__(self) -> Self:
        directory = os.path.dirname(os.path.abspath(self.prefix))
        os.makedirs(directory, exist_ok=True)
        # A name of its own for every run: two at once cannot write into each other's files. Not
        # `mkstemp`, whose files only their owner may read.
        mark = uuid.uuid4().hex[:12]
        ends = (".bin", ".idx", ".documents", ".json")
        self._parts = {end: f"{self.prefix}{end}.partial-{mark}" for end in ends}
        self._bin, self._idx, self._documents = (
            open(self._parts[end], "w+b") for end in (".bin", ".idx", ".documents")
        )
        self._idx.write(bytes(HEADER.size))  # the counts in it are known at the end
        self._documents.write(struct.pack("<q", 0))
        return self

    def add(self, *sequences: npt.ArrayLike) -> None:
        """Append one document: one sequence of token ids, or several."""
        arrays = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
        for ids in arrays:
            self._write_sequences(ids, np.array([ids.size], dtype="<i4"))
        self._end_documents(np.array([self.num_sequences], dtype="<i8"))

    def add_batch(self, ids: Tokens, lengths: npt.NDArray[np.int32]) -> None:
        """Append many one-sequence documents: their tokens one after another, and their lengths in tokens."""
        before = self.num_sequences
        self._write_sequences(ids, lengths.astype("<i4"))
        self._end_documents(np.arange(before + 1, self.num_sequences + 1, dtype="<i8"))

    def _write_sequences(self, ids: Tokens, lengths: npt.NDArray[Any]) -> None:
        assert ids.size == int(lengths.sum(dtype=np.int64)), (ids.size, lengths.sum())
        if ids.size:
            low, high = int(ids.min()), int(ids.max())
            limits = np.iinfo(self.dtype)
            if low < limits.min or high > limits.max:
                raise ValueError(
                    f"token ids {low} to {high} do not fit the {self.dtype.name} tokens of "
                    f"{self.prefix}.bin; the tokenizer's vocabulary is larger than it says"
                )
            self.max_id = max(self.max_id, high)
        self._bin.write(np.ascontiguousarray(ids, dtype=self.dtype.newbyteorder("<")).tobytes())
        self._idx.write(lengths.tobytes())
        self.num_sequences += lengths.size
        self.num_tokens += ids.size

    def _end_documents(self, ends: npt.NDArray[Any]) -> None:
        self._documents.write(ends.tobytes())
        self.num_documents += ends.size

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish_index()
                self._publish()
        finally:
            for file in (self._bin, self._idx, self._documents):
                file.close()
            for part in self._parts.values():
                Path(part).unlink(missing_ok=True)

    def _finish_index(self) -> None:
        """Offsets and document indices follow the lengths; then the header, whose counts are known now."""
        end = 0  # bytes
        for at in range(0, self.num_sequences, CHUNK):
            self._idx.seek(HEADER.size + 4 * at)
            count = min(CHUNK, self.num_sequences - at)
            sizes = np.frombuffer(self._idx.read(4 * count), "<i4").astype(np.int64) * self.dtype.itemsize
            ends = end + np.cumsum(sizes)
            self._idx.seek(HEADER.size + 4 * self.num_sequences + 8 * at)
            self._idx.write((ends - sizes).astype("<i8").tobytes())
            end = int(ends[-1])
        self._idx.seek(0, os.SEEK_END)
        self._documents.seek(0)
        while block := self._documents.read(CHUNK):
            self._idx.write(block)
        self._idx.seek(0)
        self._idx.write(HEADER.pack(MAGIC, VERSION, self._code, self.num_sequences, self.num_documents + 1))

    def _publish(self) -> None:
        _sync(self._bin)
        _sync(self._idx)
        for end in (".idx", ".json"):
            Path(self.prefix + end).unlink(missing_ok=True)
        os.replace(self._parts[".bin"], self.prefix + ".bin")
        if self._about is not None:
            about = {
                **self._about,
                "dtype": self.dtype.name,
                "num_documents": self.num_documents,
                "num_tokens": self.num_tokens,
                "max_id": self.max_id,
            }
            with open(self._parts[".json"], "wb") as file:
                file.write(json.dumps(about, indent=2, ensure_ascii=False).encode() + b"\n")
                _sync(file)
            os.replace(self._parts[".json"], self.prefix + ".json")
        os.replace(self._parts[".idx"], self.prefix + ".idx")
        _sync_directory(os.path.dirname(os.path.abspath(self.prefix)))


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_directory(path: str) -> None:
    """Make renames in a directory last through a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
