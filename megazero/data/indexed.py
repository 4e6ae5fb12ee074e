"""Token files on disk, read: Megatron's `.bin`/`.idx` pair.

`PREFIX.bin` is the tokens, nothing else. `PREFIX.idx` is little-endian and unaligned:

    9 bytes  magic "MMIDIDX\\0\\0"
    u64      version, 1
    u8       code of the token type (see `TOKEN_TYPES`)
    u64      S, the number of sequences
    u64      D, the number of document indices: documents + 1
    S x i32  sequence lengths, in tokens
    S x i64  sequence offsets into `.bin`, in bytes
    D x i64  document indices: document d is the sequences [index[d], index[d + 1])
    S x i8   sequence modes, only in multimodal files; accepted and ignored

Sequences follow each other in `.bin` without gaps, so a document is one range of tokens.
"""

import functools
import hashlib
import os
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from megazero.data.misnamed import complaint
from megazero.files import FilePool, changed, crc32, explain, identity, open_regular

MAGIC = b"MMIDIDX\0\0"
LEGACY_MAGIC = b"TNTIDX\0\0"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
# Codes 6 and 7 mean float64/float32 in one fork and float32/float64 in another; neither can hold token ids.
TOKEN_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
# Sequences (or bytes) handled at once when tables are checked or copied: bounds memory.
CHUNK = 1 << 20
# An index up to this size is read into memory: a map costs a descriptor, and 10,000 corpora are many.
RESIDENT_BYTES = 1 << 20

# The order of samples is seeded with a hash of this much of both ends of the .idx, and the sizes of both files:
# a million documents in full, and still a moment's work for a billion.
HASHED_BYTES = 16 << 20

Tokens = npt.NDArray[Any]
Int64s = npt.NDArray[np.int64]


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """The token type that Megatron picks for a vocabulary: uint16 below 65500 ids, else int32."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


class IndexedDataset:
    """The corpus `prefix.bin` + `prefix.idx`; its index is checked in full when opened.

    Note [truncated while in use]: tokens are read with `pread`, not through a memory map. A map of a file
    that another process truncates kills the process with SIGBUS at the next access; a read says how much is there.
    The index is mapped (read, if it is small), and its size is looked at before it is used.

    `files`: a pool that several corpora share. `known`: the identity of `.bin` in the process that opened it first.

    Attributes: `dtype` of a token; `lengths` int32 [S], tokens per sequence; `offsets` int64 [S], bytes;
    `document_indices` int64 [D]; `num_documents` = D - 1; `num_tokens` in the whole file.

    Raises ValueError naming --data-path if a file is missing, truncated, of another format or inconsistent.
    """

    def __init__(
        self, prefix: str | os.PathLike[str], files: FilePool | None = None, known: tuple[int, int] | None = None
    ) -> None:
        self.prefix = str(prefix)
        self._files = FilePool(1) if files is None else files
        require_pair(self.prefix)
        try:
            self._map_index()
            self._check_sequences()
            self._check_documents()
            self._check_tokens(known)
        except OSError as error:
            raise ValueError(f"--data-path {self.prefix}: {explain(error)}") from error

    def __reduce__(self) -> tuple[type["IndexedDataset"], tuple[str, FilePool, tuple[int, int]]]:
        # Pickling a memory map would copy the index: a worker process opens the files again instead.
        return IndexedDataset, (self.prefix, self._files, self._identity)

    def tokens(self, start: int, stop: int) -> Tokens:
        """Tokens [start, stop) of the whole file, read-only, of type `dtype`.

        ValueError if the file cannot be read, or has become shorter since it was opened.
        """
        assert 0 <= start <= stop <= self.num_tokens, (start, stop, self.num_tokens)
        path, count = self.prefix + ".bin", (stop - start) * self.dtype.itemsize
        try:
            raw = self._files.read(path, self._identity, count, start * self.dtype.itemsize)
        except OSError as error:
            raise ValueError(f"--data-path {self.prefix}: {explain(error)}") from error
        if len(raw) < count:
            raise self._shrunk(path)
        return np.frombuffer(raw, dtype=self.dtype.newbyteorder("<"))

    def document(self, index: int, skip: int = 0, limit: int | None = None) -> Tokens:
        """Tokens of one document, read-only: from its token `skip`, at most `limit` of them."""
        assert 0 <= index < self.num_documents, (index, self.num_documents)
        start, stop = self.document_starts(index, index + 2).tolist()
        start = min(start + skip, stop)
        return self.tokens(start, stop if limit is None else min(stop, start + limit))

    def document_starts(self, first: int, stop: int) -> Int64s:
        """First token of each document in [first, stop), int64; one past the last starts at the end."""
        self._require_whole_index()
        bounds = np.asarray(self.document_indices[first:stop])
        starts = np.full(bounds.shape, self.num_tokens, dtype=np.int64)
        inside = bounds < self.lengths.shape[0]
        starts[inside] = self.offsets[bounds[inside]] // self.dtype.itemsize
        return starts

    def document_lengths(self, first: int, stop: int) -> npt.NDArray[Any]:
        """Tokens of each document in [first, stop): int64, or int32 where a document is one sequence."""
        self._require_whole_index()
        bounds = self.document_indices[first : stop + 1]
        if all((np.diff(bounds[at : at + CHUNK + 1]) == 1).all() for at in range(0, stop - first, CHUNK)):
            return np.array(self.lengths[bounds[0] : bounds[-1]])  # unaligned in the file, which makes lookups slow
        return np.diff(self.document_starts(first, stop + 1))

    @functools.cached_property
    def index_fingerprint(self) -> str:
        """Hash of the document lengths; the order of samples is seeded with it. It does not depend on the path."""
        self._require_whole_index()
        digest = hashlib.sha256(repr((self._index.size, self.num_tokens, self.dtype.name)).encode())
        digest.update(self._index[:HASHED_BYTES].data)
        digest.update(self._index[max(0, self._index.size - HASHED_BYTES) :].data)
        return digest.hexdigest()

    @functools.cached_property
    def index_checksum(self) -> int:
        """CRC-32 of the whole index, of which `index_fingerprint` reads both ends only."""
        self._require_whole_index()
        check = 0
        for at in range(0, self._index.size, CHUNK):
            check = crc32(self._index[at : at + CHUNK], check)
        return check

    @property
    def num_mapped(self) -> int:
        """Descriptors that this corpus holds for as long as it lives."""
        return 1 if self._mapped_bytes else 0

    def _map_index(self) -> None:
        """Read the header and map the three tables."""
        path = self.prefix + ".idx"
        with os.fdopen(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            resident = size <= RESIDENT_BYTES
            head = file.read(size if resident else HEADER.size)
            raw = np.frombuffer(head, np.uint8) if resident else np.memmap(file, dtype=np.uint8, mode="r")
        self._index: npt.NDArray[np.uint8] = raw
        self._mapped_bytes = 0 if resident else size
        code, num_sequences, num_indices = parse_header(head[: HEADER.size], self.prefix)
        self.dtype: np.dtype[Any] = np.dtype(TOKEN_TYPES[code])
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

    def _check_tokens(self, known: tuple[int, int] | None) -> None:
        """The size of `.bin` must be what the index describes; OSError if its identity is not `known`."""
        path, expected = self.prefix + ".bin", self.num_tokens * self.dtype.itemsize
        self._identity = identity(path)
        if self._identity != (known or self._identity):
            raise changed(path)
        size = self._identity[0]
        if size != expected:
            what = "is truncated" if size < expected else "does not belong to this .idx"
            raise ValueError(
                f"--data-path {self.prefix}: {path} {what}: {size} bytes, the index describes {expected}; "
                f"copy both files again or rerun data_tools/preprocess_data.py"
            )

    def _require_whole_index(self) -> None:
        """ValueError if the mapped index has become shorter: an access would end the process."""
        if self._mapped_bytes and os.stat(self.prefix + ".idx").st_size < self._mapped_bytes:
            raise self._shrunk(self.prefix + ".idx")

    def _shrunk(self, path: str) -> ValueError:
        return ValueError(
            f"--data-path {self.prefix}: {path} was truncated while it was in use; copy both files again or rerun "
            f"data_tools/preprocess_data.py, and resume from the last checkpoint"
        )


def require_pair(prefix: str) -> None:
    """ValueError naming --data-path unless both files of `prefix` are regular files."""
    paths = [prefix + end for end in (".bin", ".idx")]
    missing = [path for path in paths if not os.path.exists(path)]
    if not missing:
        for path in paths:
            if not os.path.isfile(path):
                raise ValueError(f"--data-path {prefix}: {path} is not a regular file; name a corpus")
        return
    stem, end = os.path.splitext(prefix)
    if end in (".bin", ".idx") and os.path.isfile(stem + end):
        raise ValueError(f"--data-path {prefix}: give the prefix without {end}: {stem}")
    raise ValueError(f"--data-path {prefix}: {complaint(prefix, missing)}")


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
    if code not in TOKEN_TYPES:
        why = "float32 in one fork, float64 in another" if code in (6, 7) else "which is unknown"
        raise ValueError(
            f"--data-path {prefix}: {path} has token type code {code}, {why}; token ids are stored as one of "
            f"{', '.join(f'{c} ({np.dtype(t).name})' for c, t in TOKEN_TYPES.items())}: preprocess the text again"
        )
    return code, num_sequences, num_indices
