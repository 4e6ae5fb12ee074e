"""The order of documents and samples in one epoch: two permutations and a running sum, cached on disk.

Everything here is a pure function of (corpus, split, sequence length, seed, epoch). The cache only saves
time: a table that is missing, damaged or unwritable is computed again, and any number of processes may race
for it.
"""

import hashlib
import os
import tempfile
import uuid
import zlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megazero.data.indexed import CHUNK, IndexedDataset, Int64s

# Part of every key. Raise it when the meaning of a table changes, so that an old cache is never read.
TABLE_VERSION = 1
# A corpus is recognised by this much of both ends of its .idx (and the sizes of both files): a million
# documents in full, and still a moment's work for a billion.
FINGERPRINT_BYTES = 16 << 20


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
    """All that an epoch's tables depend on; the split is documents [first_document, stop_document)."""

    fingerprint: str
    first_document: int
    stop_document: int
    num_tokens: int
    seq_length: int
    seed: int

    def name(self, epoch: int) -> str:
        """A file name that differs whenever the table does."""
        digest = hashlib.sha256(repr((TABLE_VERSION, self, epoch)).encode()).hexdigest()[:16]
        return f"epoch{epoch}-seq{self.seq_length}-seed{self.seed}-{digest}.npy"

    def generator(self, purpose: str, epoch: int) -> np.random.PCG64:
        """The random stream for one permutation. Document order does not depend on the sequence length."""
        split = (self.fingerprint, self.first_document, self.stop_document)
        sizes = (self.seq_length,) if purpose == "samples" else ()
        text = repr((purpose, split, sizes, self.seed, epoch))
        return np.random.PCG64(int.from_bytes(hashlib.sha256(text.encode()).digest(), "little"))

    def sample_range(self, epoch: int) -> tuple[int, int]:
        """[first, stop) of the samples that begin in the epoch; sample i begins at token i * s."""
        first, stop = (-(-e * self.num_tokens // self.seq_length) for e in (epoch, epoch + 1))
        return first, stop


def fingerprint(data: IndexedDataset) -> str:
    """Recognises a corpus by content, not by path: it may be moved or copied between two runs."""
    path = data.prefix + ".idx"
    size = os.path.getsize(path)
    digest = hashlib.sha256(repr((size, data.num_tokens, data.dtype.name)).encode())
    with open(path, "rb") as file:
        digest.update(file.read(FINGERPRINT_BYTES))
        file.seek(max(0, size - FINGERPRINT_BYTES))
        digest.update(file.read(FINGERPRINT_BYTES))
    return digest.hexdigest()


def permutation(generator: np.random.PCG64, count: int) -> Int64s:
    """A random permutation of range(count), int64.

    Note [stable permutation]: numpy promises that a bit generator's raw stream never changes, but not what
    `Generator.permutation` makes of it. A resumed run must see the same order after an upgrade, so we sort
    the raw stream ourselves, stably, for equal keys.
    """
    return np.argsort(generator.random_raw(count), kind="stable").astype(np.int64, copy=False)


def build_table(data: IndexedDataset, key: EpochKey, epoch: int) -> EpochTable:
    """Compute an epoch's table: O(D log D + n log n)."""
    num_documents = key.stop_document - key.first_document
    order = permutation(key.generator("documents", epoch), num_documents)
    bounds = data.document_starts(key.first_document, key.stop_document + 1)
    starts = np.zeros(num_documents + 1, dtype=np.int64)
    np.cumsum(np.diff(bounds)[order], out=starts[1:])
    assert starts[-1] == key.num_tokens, (starts[-1], key.num_tokens)
    first, stop = key.sample_range(epoch)
    return EpochTable(order + key.first_document, starts, permutation(key.generator("samples", epoch), stop - first))


def load_table(data: IndexedDataset, key: EpochKey, epoch: int) -> EpochTable:
    """The epoch's table from the cache, memory-mapped; else computed, and cached where we may write."""
    num_documents = key.stop_document - key.first_document
    first, stop = key.sample_range(epoch)
    for directory in _cache_directories(data.prefix):
        path = os.path.join(directory, key.name(epoch))
        flat = _read(path, count=2 * num_documents + 1 + stop - first)
        if flat is not None:
            cuts = [num_documents, 2 * num_documents + 1]
            order, starts, shuffle = np.split(flat, cuts)
            return EpochTable(order, starts, shuffle)
    table = build_table(data, key, epoch)
    for directory in _cache_directories(data.prefix):
        if _write(directory, key.name(epoch), table):
            break
    return table


def _cache_directories(prefix: str) -> tuple[str, str]:
    """Where tables may lie: next to the data; else, as that may be read-only, in the temporary directory."""
    name = hashlib.sha256(os.path.abspath(prefix).encode()).hexdigest()[:16]
    own = os.path.join(tempfile.gettempdir(), f"megazero-index-cache-{os.getuid()}", name)
    return f"{prefix}_index_cache", own


def _checksum(flat: Int64s) -> int:
    check = 0
    for at in range(0, flat.shape[0], CHUNK):
        check = zlib.crc32(flat[at : at + CHUNK].tobytes(), check)
    return check


def _read(path: str, count: int) -> Int64s | None:
    """The `count` numbers of a table file, memory-mapped; None unless it is there, whole and undamaged."""
    try:
        flat = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    if flat.dtype != np.int64 or flat.shape != (count + 1,) or flat[-1] != _checksum(flat[:-1]):
        return None
    table: Int64s = flat[:-1].view(np.ndarray)
    return table


def _write(directory: str, name: str, table: EpochTable) -> bool:
    """Store a table and its checksum as one int64 array, atomically. False if it cannot be written there."""
    flat = np.concatenate([*table, np.zeros(1, dtype=np.int64)])
    flat[-1] = _checksum(flat[:-1])
    temporary = os.path.join(directory, f".{uuid.uuid4().hex}.npy")  # its own: ranks race for the same name
    try:
        os.makedirs(directory, mode=0o777 if directory.endswith("_index_cache") else 0o700, exist_ok=True)
        try:
            np.save(temporary, flat, allow_pickle=False)
            os.replace(temporary, os.path.join(directory, name))
        finally:
            if os.path.exists(temporary):
                os.remove(temporary)
    except OSError:
        return False
    return True
