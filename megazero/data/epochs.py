"""The order of documents and samples in one epoch: two permutations and a running sum; and the cache of such tables.

All of it is a pure function of (corpus, split, sequence length, seed, epoch). The cache only saves time and memory:
processes of a node map the same file. A file ends in the CRC-32 of its name and its numbers; one with another CRC-32 is
computed again.
"""

import fcntl
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from megazero.data.indexed import Int64s
from megazero.files import crc32, open_to_write, replacing

# Part of every file name. Raise it when the meaning of a table changes, so that older files are not read.
TABLE_VERSION = 1
# Smaller tables are not cached.
CACHED_BYTES = 1 << 20
# Bytes before the first number in a .npy file of one dimension.
HEADER_BYTES = 128
# Draws the first n numbers of a random stream.
RawStream = Callable[[int], npt.NDArray[np.uint64]]


class HasDocuments(Protocol):
    """A corpus, or a range of its tokens."""

    prefix: str

    def document_lengths(self, first: int, stop: int) -> npt.NDArray[Any]:
        """Tokens of each document in [first, stop)."""


class EpochTable(NamedTuple):
    """One epoch of a split of D documents, N tokens, from which n samples start.

    `order` int64 [D]: the epoch's documents as numbers in the corpus; `starts` int64 [D + 1]: the token of
    the epoch at which each begins, last N; `shuffle` int64 [n]: sample (first + k) of the run is (first +
    shuffle[k]) of the stream.
    """

    order: Int64s
    starts: Int64s
    shuffle: Int64s


@dataclass(frozen=True)
class EpochKey:
    """Everything on which an epoch's table depends; the split is documents [first_document, stop_document)."""

    fingerprint: str
    first_document: int
    stop_document: int
    num_tokens: int
    seq_length: int
    seed: int

    def name(self, table: int | str) -> str:
        """A file name that differs whenever the table does. table: an epoch, or the name of another table."""
        digest = hashlib.sha256(repr((TABLE_VERSION, self, table)).encode()).hexdigest()[:16]
        kind = f"epoch{table}" if isinstance(table, int) else table
        return f"{kind}-seq{self.seq_length}-seed{self.seed}-{digest}.npy"

    def stream(self, purpose: str, epoch: int) -> RawStream:
        """The random stream of one permutation. Document order does not depend on the sequence length."""
        split = (self.fingerprint, self.first_document, self.stop_document)
        sizes = () if purpose == "documents" else (self.seq_length,)
        text = repr((purpose, split, sizes, self.seed, epoch))
        seed = np.random.SeedSequence(int.from_bytes(hashlib.sha256(text.encode()).digest(), "little"))
        return lambda count: np.random.PCG64(seed).random_raw(count)

    def sample_range(self, epoch: int) -> tuple[int, int]:
        """[first, stop) of the samples that begin in the epoch; sample i begins at token i * s."""
        first, stop = (-(-e * self.num_tokens // self.seq_length) for e in (epoch, epoch + 1))
        return first, stop


def permutation(stream: RawStream, count: int) -> Int64s:
    """A random permutation of range(count), int64: the stable sort of the first `count` numbers of `stream`.

    Note [stable permutation]: numpy guarantees that a bit generator's raw stream never changes, but not that
    `Generator.permutation` keeps its result. A resumed run must see the same order after an upgrade, so we sort the raw
    stream ourselves.

    Sorting numbers is several times faster than `argsort`. So the low bits of each number are replaced by its position.
    The few numbers that agree in all other bits are sorted again afterwards, by the whole number.
    """
    low = np.uint64((1 << max(1, (count - 1).bit_length())) - 1)
    packed = stream(count)
    packed &= ~low
    packed |= np.arange(count, dtype=np.uint64)
    packed.sort()
    equal = np.flatnonzero((packed[1:] ^ packed[:-1]) <= low)
    if equal.size:
        ties = np.union1d(equal, equal + 1)
        positions = packed[ties] & low
        packed[ties] = positions[np.lexsort((positions, stream(count)[positions]))]
    packed &= low
    return packed.view(np.int64)


def build_table(data: HasDocuments, key: EpochKey, epoch: int) -> EpochTable:
    """Compute an epoch's table: O(D log D + n log n)."""
    num_documents = key.stop_document - key.first_document
    order = permutation(key.stream("documents", epoch), num_documents)
    lengths = data.document_lengths(key.first_document, key.stop_document)
    starts = np.zeros(num_documents + 1, dtype=np.int64)
    np.cumsum(lengths[order], out=starts[1:])
    assert starts[-1] == key.num_tokens, (starts[-1], key.num_tokens)
    order += key.first_document
    first, stop = key.sample_range(epoch)
    return EpochTable(order, starts, permutation(key.stream("samples", epoch), stop - first))


def load_table(data: HasDocuments, key: EpochKey, epoch: int) -> EpochTable:
    """Return the epoch's table from the cache, or compute it."""
    first, stop = key.sample_range(epoch)
    num_documents = key.stop_document - key.first_document
    sizes = num_documents, num_documents + 1, stop - first
    return EpochTable(*load_parts(data.prefix, key.name(epoch), lambda: build_table(data, key, epoch), sizes))


def load_parts(
    prefix: str, name: str, build: Callable[[], Sequence[Int64s]], sizes: Sequence[int], stored_sizes: int = 0
) -> Sequence[Int64s]:
    """Map the parts of a table from the cache; if it is missing, compute it, and cache it where we may write.

    Small tables are computed at once: that takes milliseconds, and a blend of 10,000 corpora would have 10,000 files.
    If several processes need a table at the same time, one computes it, and the others wait for it and map it. They
    wait for a lock, not at a barrier, because a later epoch begins at different moments on different ranks.

    Args:
        prefix: of the corpus.
        name: of the file.
        build: computes the parts, int64 each.
        sizes: numbers in each part, of which all together decide whether the table is small.
        stored_sizes: number of parts, if only `build` finds their sizes. The file then begins with these.
    """
    if 8 * sum(sizes) <= CACHED_BYTES:
        return build()
    known = None if stored_sizes else sizes
    paths = [os.path.join(folder, name) for folder in _cache_folders(prefix)]
    for path in paths:
        if (found := _mapped(path, known, stored_sizes, prefix)) is not None:
            return found
    parts = None
    for path in paths:
        with suppress(OSError), _locked(os.path.dirname(path)):
            found = _mapped(path, known, stored_sizes, prefix)  # another process may have written it meanwhile
            if found is None:
                parts = build() if parts is None else parts
                head = [np.array([part.size for part in parts])] if stored_sizes else []
                _write(path, [*head, *parts])
                found = _mapped(path, known, stored_sizes, prefix)
            if found is not None:
                return found
    return build() if parts is None else parts


def _cache_folders(prefix: str) -> Iterator[str]:
    """Make and yield the folders for tables: next to the corpus, and for a read-only corpus the user's own.

    A folder that everybody can write, or that belongs neither to this user nor to the owner of the corpus, is left out;
    so is a link of such a user, which could lead into any of our folders.
    """
    owners = {os.getuid(), os.stat(f"{prefix}.idx").st_uid}
    own = os.path.join(tempfile.gettempdir(), f"megazero-index-cache-{os.getuid()}")
    for folder, mode in ((f"{prefix}_index_cache", 0o775), (own, 0o700)):
        with suppress(OSError):
            os.makedirs(folder, mode, exist_ok=True)
            found = os.stat(folder)
            if {found.st_uid, os.lstat(folder).st_uid} <= owners and not found.st_mode & stat.S_IWOTH:
                yield folder


@contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Hold the lock of a folder, which the system releases if its holder dies. OSError if the folder is read-only."""
    file = open_to_write(os.path.join(folder, ".lock"))
    try:
        with suppress(OSError):  # a file system without locks: each process computes the table
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def _mapped(path: str, sizes: Sequence[int] | None, stored_sizes: int, prefix: str) -> list[Int64s] | None:
    """Map the parts of a table file. None if it is missing, damaged, of another size, or older than the corpus.

    sizes: lengths of the parts; None: the file begins with `stored_sizes` of them.
    """
    try:
        found = os.stat(path)
        count, rest = divmod(found.st_size - HEADER_BYTES, 8)
        current = found.st_mtime_ns >= os.stat(f"{prefix}.idx").st_mtime_ns
        if not current or rest or count <= (stored_sizes if sizes is None else sum(sizes)):
            return None
        flat = np.memmap(path, np.int64, "r", HEADER_BYTES, (count,)).view(np.ndarray)
    except (OSError, ValueError):
        return None
    flat, check = flat[:-1], flat[-1]
    if check != _checksum(path, [flat]):
        return None
    if sizes is None:
        sizes, flat = flat[:stored_sizes].tolist(), flat[stored_sizes:]
    if min(sizes, default=-1) < 0 or flat.size != sum(sizes):
        return None
    return np.split(flat, np.cumsum(sizes[:-1]))


def _checksum(path: str, parts: Sequence[Int64s]) -> int:
    """Return the CRC-32 of a table's name and numbers: a table under another's name is no use either."""
    check = crc32(os.path.basename(path).encode())
    for part in filter(len, parts):
        check = crc32(part.data, check)
    return check


def _write(path: str, parts: Sequence[Int64s]) -> None:
    """Write a table as one .npy array. An existing file is replaced at once, so that no reader sees a part of one."""
    parts = [*parts, np.array([_checksum(path, parts)])]
    header = {"descr": "<i8", "fortran_order": False, "shape": (sum(part.size for part in parts),)}
    with suppress(OSError):
        if not os.path.isfile(path):  # a FIFO or a device, which `replacing` refuses, in a folder of our own files
            os.unlink(path)
    with replacing(path, durable=False) as file:
        np.lib.format.write_array_header_1_0(file, header)
        for part in filter(len, parts):
            file.write(part.data)
