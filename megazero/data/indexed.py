"""Token files on disk, read: Megatron's `.bin`/`.idx` pair, and our mask of targets.

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

`PREFIX.mask`, if it exists, has a byte per token: 1 if the token counts as a target in the loss, else 0.
"""

import errno
import functools
import glob
import hashlib
import io
import os
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from megazero.files import explain, read_at

MAGIC = b"MMIDIDX\0\0"
# llm.c's first number, of GPT-2's and of Llama 3's tokens.
LLM_C_MAGICS = (20240520, 20240801)
LEGACY_MAGIC = b"TNTIDX\0\0"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
# Codes 6 and 7 mean float64/float32 in one fork and float32/float64 in another; neither can hold token ids.
TOKEN_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
# Sequences (or bytes) handled at once when tables are checked or copied: bounds memory.
CHUNK = 1 << 16
# A larger index is mapped, a smaller one read: a map holds a file descriptor, and a blend may have 10,000 corpora.
RESIDENT_BYTES = 1 << 20
# Files of tokens that are open at once: most systems allow a process 1024.
OPEN_FILES = 128
# The order of samples is seeded with a hash of the sizes of both files and of this much of both ends of the index:
# the whole index of a million documents.
HASHED_BYTES = 16 << 20
REMAKE = "copy both files again, or rerun data_tools/preprocess_data.py"

Tokens = npt.NDArray[Any]
Int64s = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
# Size and time of the last write of a file. No inode: some file systems number them again.
Identity = tuple[int, int]


def dtype_for(vocab_size: int) -> np.dtype[Any]:
    """The token type that Megatron picks for a vocabulary: uint16 below 65500 ids, else int32."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


def _of_other_program(path: str) -> str:
    """Return the way out for tokens without an index: copy it, or make one of nanoGPT's or llm.c's file."""
    with open(path, "rb") as file:
        head = file.read(4)
    recipe = 'the lines in data_tools/README.md, "Tokens of nanoGPT and llm.c", make a corpus of it'
    if int.from_bytes(head, "little") in LLM_C_MAGICS:
        return f"it is a file of llm.c: {recipe}"
    return f"copy that file too; or, if nanoGPT wrote the tokens, {recipe}"


def _identity(file: str | int) -> Identity:
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns


@functools.lru_cache(maxsize=OPEN_FILES)
def _open(path: str, identity: Identity) -> io.FileIO:
    """Open a file of tokens; the least recently used one is closed. OSError if its identity has changed.

    A file that is still open is not compared, because its content stays even if another file takes its name.
    """
    file = io.FileIO(path)
    if _identity(file.fileno()) != identity:
        file.close()
        raise OSError(errno.ESTALE, "the file was replaced or written to while it was in use", path)
    return file


class IndexedDataset:
    """The corpus `prefix.bin` + `prefix.idx`; its index is checked in full when opened.

    Note [truncated while in use]: tokens are read with `pread`, not through a memory map. If another process truncates
    a mapped file, the next access kills this process with SIGBUS; a short read is an error that we can report. The
    index is mapped (read, if it is small), and its size is compared before it is used.

    `prefix` is the path of both files without their suffixes.

    Attributes: `dtype` of a token; `lengths` int32 [S], tokens per sequence; `offsets` int64 [S], bytes;
    `document_indices` int64 [D]; `num_documents` = D - 1; `num_tokens` in the whole file; `masked`: it has a mask.

    Raises ValueError naming --data-path if a file is missing, truncated, of another format or inconsistent.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = str(prefix)
        self._require_pair()
        try:
            self._map_index()
            self._check_sequences()
            self._check_documents()
            self._identity = self._checked_size(".bin", self.dtype.itemsize)
            self.masked = os.path.lexists(self.prefix + ".mask")
            self._mask_identity = self._checked_size(".mask", 1) if self.masked else None
        except OSError as error:
            raise self._refusal(explain(error)) from error

    def tokens(self, start: int, stop: int) -> Tokens:
        """Tokens [start, stop) of the whole file, read-only, of type `dtype`.

        ValueError if the file cannot be read, or has become shorter since it was opened.
        """
        assert 0 <= start <= stop <= self.num_tokens, (start, stop, self.num_tokens)
        return self._read(".bin", self._identity, self.dtype.newbyteorder("<"), start, stop)

    def mask(self, start: int, stop: int) -> Mask:
        """Return, for each of tokens [start, stop), whether it counts as a target. All do if there is no mask.

        ValueError if a byte of the mask is neither 0 nor 1.
        """
        assert 0 <= start <= stop <= self.num_tokens, (start, stop, self.num_tokens)
        if self._mask_identity is None:
            return np.ones(stop - start, np.bool_)
        marks = self._read(".mask", self._mask_identity, np.dtype(np.uint8), start, stop)
        if marks.max(initial=0) > 1:
            place = int((marks > 1).argmax())
            raise self._refusal(
                f"{self.prefix}.mask has byte {marks[place]} for token {start + place:,}, and only 0 and 1 (a target) "
                "are known; write these, as bytes and not as digits, or preprocess the text again"
            )
        return marks.view(np.bool_)

    def _read(self, end: str, identity: Identity, dtype: np.dtype[Any], start: int, stop: int) -> npt.NDArray[Any]:
        path, count = self.prefix + end, (stop - start) * dtype.itemsize
        try:
            file = _open(path, identity)  # a local name, so that it stays open during the read
            raw = read_at(file.fileno(), count, start * dtype.itemsize)
        except OSError as error:
            raise self._refusal(explain(error)) from error
        if len(raw) < count:
            raise self._shrunk(path)
        return np.frombuffer(raw, dtype=dtype)

    def document(self, index: int, skip: int = 0, limit: int | None = None) -> Tokens:
        """Tokens of one document, read-only: from its token `skip`, at most `limit` of them."""
        return self.tokens(*self.span(index, skip, limit))

    def span(self, index: int, skip: int = 0, limit: int | None = None) -> tuple[int, int]:
        """The range in the whole file of the tokens that `document` returns."""
        assert 0 <= index < self.num_documents, (index, self.num_documents)
        start, stop = self.document_starts(index, index + 2).tolist()
        start = min(start + skip, stop)
        return start, stop if limit is None else min(stop, start + limit)

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

    def _refusal(self, fault: str) -> ValueError:
        return ValueError(f"--data-path {self.prefix}: {fault}")

    def _require_pair(self) -> None:
        paths = [self.prefix + end for end in (".bin", ".idx")]
        missing = [path for path in paths if not os.path.isfile(path)]
        if not missing:
            return
        stem, end = os.path.splitext(self.prefix)
        near = [path[:-4] for path in sorted(glob.glob(f"{glob.escape(self.prefix)}_*.idx"))]
        way_out = "make a corpus with data_tools/preprocess_data.py, and give the prefix that it prints"
        base = self.prefix.removesuffix(".bin")
        if os.path.isfile(f"{base}.bin") and not os.path.isfile(f"{base}.idx"):
            raise self._refusal(f"{base}.bin has no {base}.idx; {_of_other_program(f'{base}.bin')}")
        if os.path.isfile(self.prefix):
            near = [stem] if end in (".bin", ".idx") else []
            way_out = (
                f"if {self.prefix} is a text, make a corpus of it: python data_tools/preprocess_data.py --input "
                f"{self.prefix} --output-prefix runs/{os.path.basename(stem)} --tokenizer byte --append-eod"
            )
        if near:
            way_out = f"did you mean {' or '.join(near[:3])}?"
        raise self._refusal(f"no file {' or '.join(missing)}; {way_out}")

    def _map_index(self) -> None:
        """Read the header and map the three tables."""
        path = self.prefix + ".idx"
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            resident = size <= RESIDENT_BYTES
            head = file.read(size if resident else HEADER.size)
            raw = np.frombuffer(head, np.uint8) if resident else np.memmap(file, dtype=np.uint8, mode="r")
        self._index: npt.NDArray[np.uint8] = raw
        self._mapped_bytes = 0 if resident else size
        code, num_sequences, num_indices = self._parse_header(head[: HEADER.size])
        self.dtype: np.dtype[Any] = np.dtype(TOKEN_TYPES[code])
        expected = HEADER.size + 12 * num_sequences + 8 * num_indices
        if size not in (expected, expected + num_sequences):  # with a byte per sequence: a multimodal file
            fault = "truncated" if size < expected else "damaged"
            raise self._refusal(f"{path} is {fault}: {size} bytes, its header promises {expected}; {REMAKE}")

        def table(dtype: str, count: int, at: int) -> npt.NDArray[Any]:
            return np.frombuffer(raw, dtype=dtype, count=count, offset=at)

        self.lengths: npt.NDArray[np.int32] = table("<i4", num_sequences, HEADER.size)
        self.offsets: Int64s = table("<i8", num_sequences, HEADER.size + 4 * num_sequences)
        self.document_indices: Int64s = table("<i8", num_indices, HEADER.size + 12 * num_sequences)
        self.num_documents = num_indices - 1

    def _parse_header(self, head: bytes) -> tuple[int, int, int]:
        """(dtype code, S, D) from the first bytes of the index. ValueError for any other format."""
        path, again = self.prefix + ".idx", "preprocess the text again with data_tools/preprocess_data.py"
        if head.startswith(LEGACY_MAGIC):
            raise self._refusal(f"{path} is in the legacy TNTIDX format of fairseq and old Megatron-LM; {again}")
        if head[: len(MAGIC)] != MAGIC[: len(head)] or not head:
            raise self._refusal(f"{path} is no Megatron index: it begins with {head[:9]!r}, not {MAGIC!r}; {again}")
        if len(head) < HEADER.size:
            raise self._refusal(f"{path} is truncated: {len(head)} bytes, and a header has {HEADER.size}; {REMAKE}")
        _, version, code, num_sequences, num_indices = HEADER.unpack(head)
        if version != VERSION:
            raise self._refusal(f"{path} has index version {version}, and only {VERSION} is known; {again}")
        if code not in TOKEN_TYPES:
            why = "float32 in one fork, float64 in another" if code in (6, 7) else "which is unknown"
            known = ", ".join(f"{number} ({np.dtype(kind).name})" for number, kind in TOKEN_TYPES.items())
            raise self._refusal(f"{path} has token type code {code}, {why}; expected one of {known}: {again}")
        return code, num_sequences, num_indices

    def _check_sequences(self) -> None:
        """Check that every sequence begins where the previous one ends; set `num_tokens`."""
        end = 0  # bytes
        for at in range(0, self.lengths.shape[0], CHUNK):
            lengths = self.lengths[at : at + CHUNK].astype(np.int64)
            ends = end + np.cumsum(lengths * self.dtype.itemsize)
            bad = lengths < 0
            bad |= self.offsets[at : at + CHUNK] != ends - lengths * self.dtype.itemsize
            if bad.any():
                i = at + int(bad.argmax())
                raise self._refusal(
                    f"{self.prefix}.idx is inconsistent at sequence {i}: length {self.lengths[i]}, offset "
                    f"{self.offsets[i]}; every sequence must begin where the previous one ends; {REMAKE}"
                )
            end = int(ends[-1])
        self.num_tokens = end // self.dtype.itemsize

    def _check_documents(self) -> None:
        """Document indices rise from 0 to S. Equal neighbours are empty documents, which Megatron writes."""
        num_sequences = self.lengths.shape[0]
        indices = self.document_indices
        whole = indices.shape[0] > 0 and indices[0] == 0 and indices[-1] == num_sequences
        for at in range(0, indices.shape[0], CHUNK):
            part = indices[at : at + CHUNK + 1]  # one more, so that the borders of chunks are compared too
            whole = whole and bool((part[1:] >= part[:-1]).all())
        if not whole:
            raise self._refusal(
                f"the document indices in {self.prefix}.idx do not rise from 0 to the {num_sequences} sequences; "
                f"the file is damaged: {REMAKE}"
            )

    def _checked_size(self, end: str, token_bytes: int) -> Identity:
        """Check that a file has the size that the index describes; its identity."""
        path, expected = self.prefix + end, self.num_tokens * token_bytes
        identity = _identity(path)
        size = identity[0]
        if size != expected:
            fault = "is truncated" if size < expected else "does not belong to this .idx"
            raise self._refusal(f"{path} {fault}: {size} bytes, the index describes {expected}; {REMAKE}")
        return identity

    def _require_whole_index(self) -> None:
        """ValueError if the mapped index has become shorter: an access would end the process."""
        if self._mapped_bytes and os.stat(self.prefix + ".idx").st_size < self._mapped_bytes:
            raise self._shrunk(self.prefix + ".idx")

    def _shrunk(self, path: str) -> ValueError:
        return self._refusal(f"{path} was truncated while it was in use; {REMAKE}, and resume from the last checkpoint")
