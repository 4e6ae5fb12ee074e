"""The order of documents and samples in one epoch: two permutations and a running sum, cached on disk.

Everything here is a pure function of (corpus, split, sequence length, seed, epoch). The cache only saves
time: a table that is missing, damaged or unwritable is computed again, and any number of processes may race
for it.
"""

import errno
import fcntl
import hashlib
import io
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from megazero.data.indexed import CHUNK, RESIDENT_BYTES, Int64s
from megazero.files import crc32, open_regular, replacing

# Part of every key. Raise it when the meaning of a table changes, so that an old cache is never read.
TABLE_VERSION = 1
# (first, count) -> so many numbers of an endless stream of 64-bit numbers, from number `first` on.
RawStream = Callable[[int, int], npt.NDArray[np.uint64]]
# Numbers worked on at once: few enough to stay in a core's cache, enough for numpy's calls to cost nothing.
STRETCH = 1 << 15
# Smaller tables are not cached.
CACHED_BYTES = 1 << 20
# How long a process waits for another that computes the table it needs: a billion documents take minutes.
LOCK_SECONDS = 900.0


class Documents(Protocol):
    """Documents with their lengths: a corpus, or a range of its tokens."""

    prefix: str

    @property
    def index_checksum(self) -> int:
        """A checksum of the whole index."""

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

    def stream(self, purpose: str, epoch: int) -> RawStream:
        """The random stream for one permutation. Document order does not depend on the sequence length."""
        split = (self.fingerprint, self.first_document, self.stop_document)
        sizes = (self.seq_length,) if purpose == "samples" else ()
        text = repr((purpose, split, sizes, self.seed, epoch))
        seed = np.random.SeedSequence(int.from_bytes(hashlib.sha256(text.encode()).digest(), "little"))

        def draw(first: int, count: int) -> npt.NDArray[np.uint64]:
            generator = np.random.PCG64(seed)
            generator.advance(first)
            return generator.random_raw(count)

        return draw

    def sample_range(self, epoch: int) -> tuple[int, int]:
        """[first, stop) of the samples that begin in the epoch; sample i begins at token i * s."""
        first, stop = (-(-e * self.num_tokens // self.seq_length) for e in (epoch, epoch + 1))
        return first, stop


def permutation(stream: RawStream, count: int) -> Int64s:
    """A random permutation of range(count), int64.

    Note [stable permutation]: numpy promises that a bit generator's raw stream never changes, but not what
    `Generator.permutation` makes of it. A resumed run must see the same order after an upgrade, so we sort
    the raw stream ourselves, stably, for equal keys.

    Sorting numbers is several times faster than sorting their positions: the lowest bits of each key are
    replaced by its position, and the few keys that agree in all others are put right afterwards. All but the
    sort works on stretches that stay in a core's cache.
    """
    low = np.uint64((1 << max(1, (count - 1).bit_length())) - 1)
    packed = np.empty(count, dtype=np.uint64)
    positions = np.arange(min(count, STRETCH), dtype=np.uint64)
    for at in range(0, count, STRETCH):
        part = packed[at : at + STRETCH]
        np.bitwise_and(stream(at, part.size), ~low, out=part)
        part |= positions[: part.size]
        positions += np.uint64(STRETCH)
    packed.sort()
    ties = [np.zeros(0, dtype=np.int64)]
    for at in range(0, count - 1, STRETCH):
        part = packed[at : at + STRETCH + 1]
        ties.append(at + np.flatnonzero((part[1:] ^ part[:-1]) <= low))  # with the one behind each
    equal = np.concatenate(ties)
    if equal.size:
        places = np.union1d(equal, equal + 1)
        some = packed[places] & low
        keys = _numbers_at(stream, some.astype(np.int64))
        packed[places] = some[np.lexsort((some, keys, packed[places] & ~low))]
    for at in range(0, count, STRETCH):
        packed[at : at + STRETCH] &= low
    return packed.view(np.int64)


def _numbers_at(stream: RawStream, positions: Int64s) -> npt.NDArray[np.uint64]:
    """Draw the numbers of a stream at `positions`, a stretch at a time."""
    found = np.empty(positions.size, dtype=np.uint64)
    stretches = positions // STRETCH
    order = np.argsort(stretches, kind="stable")
    for group in np.split(order, np.flatnonzero(np.diff(stretches[order])) + 1):
        at = int(stretches[group[0]]) * STRETCH
        found[group] = stream(at, int(positions[group].max()) + 1 - at)[positions[group] - at]
    return found


def build_table(data: Documents, key: EpochKey, epoch: int) -> EpochTable:
    """Compute an epoch's table: O(D log D + n log n)."""
    num_documents = key.stop_document - key.first_document
    order = permutation(key.stream("documents", epoch), num_documents)
    lengths = data.document_lengths(key.first_document, key.stop_document)
    starts = np.zeros(num_documents + 1, dtype=np.int64)
    for at in range(0, num_documents, STRETCH):
        part = starts[at + 1 : at + STRETCH + 1]
        np.cumsum(lengths[order[at : at + STRETCH]], out=part)
        part += starts[at]
    assert starts[-1] == key.num_tokens, (starts[-1], key.num_tokens)
    order += key.first_document
    first, stop = key.sample_range(epoch)
    return EpochTable(order, starts, permutation(key.stream("samples", epoch), stop - first))


def load_table(data: Documents, key: EpochKey, epoch: int) -> EpochTable:
    """The epoch's table from the cache, memory-mapped; else computed, and cached where we may write.

    A small one is computed at once: that takes milliseconds, and a blend of 10,000 corpora would have 10,000
    small files. Of the processes that want it at once, on one node or on a shared disk, one computes it, and the others
    wait and map it.
    """
    first, stop = key.sample_range(epoch)
    if 8 * (2 * (key.stop_document - key.first_document) + stop - first) < CACHED_BYTES:
        return build_table(data, key, epoch)
    table = _cached(data, key, epoch)
    if table is not None:
        return table
    with _alone(data.prefix, key.name(epoch)):
        # Again, for another process may have finished since, even one that was not waited for.
        if (table := _cached(data, key, epoch)) is not None:
            return table
        table = build_table(data, key, epoch)
        salt = _salt(data, key, epoch)
        stored = any(_write(directory, key.name(epoch), table, salt) for directory in _cache_directories(data.prefix))
    # Mapped, it is shared with the other processes; as it was computed, it is this one's own memory.
    return (_cached(data, key, epoch, check=False) if stored else None) or table


def _cached(data: Documents, key: EpochKey, epoch: int, check: bool = True) -> EpochTable | None:
    num_documents = key.stop_document - key.first_document
    first, stop = key.sample_range(epoch)
    salt = _salt(data, key, epoch) if check else None
    limits = ((key.first_document, key.stop_document), (0, key.num_tokens + 1), (0, stop - first))
    for directory in _cache_directories(data.prefix):
        flat = _read(directory, key.name(epoch), 2 * num_documents + 1 + stop - first, salt)
        if flat is not None:
            table = EpochTable(*np.split(flat, [num_documents, 2 * num_documents + 1]))
            if not check or all(_within(part, *limit) for part, limit in zip(table, limits, strict=True)):
                return table
    return None


def _within(numbers: Int64s, low: int, stop: int) -> bool:
    return not numbers.size or (low <= int(numbers.min()) and int(numbers.max()) < stop)


def _salt(data: Documents, key: EpochKey, epoch: int) -> int:
    """Value at which the checksum of a table begins: a table of another corpus, key or epoch then fails it.

    The key alone does not suffice: its fingerprint reads both ends of the index, and a corpus that is made again may
    differ in between.
    """
    return crc32(repr((data.index_checksum, key, epoch)).encode())


@contextmanager
def _alone(prefix: str, name: str) -> Iterator[None]:
    """Keep other processes from computing the same table meanwhile.

    By a lock on a file in the cache, which the system gives back when its holder dies. Where no file can be
    made or locked, or one waits for too long (its holder may be stopped), each computes its own.
    """
    handle = None
    for directory in _cache_directories(prefix):
        if _make_trusted(directory):
            path = os.path.join(directory, f".{name}.lock")
            with suppress(OSError):
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
                break
    if handle is None:
        yield
        return
    try:
        give_up = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES) or time.monotonic() > give_up:
                    break
                time.sleep(0.05)
        yield
    finally:
        with suppress(OSError):
            os.unlink(path)
        os.close(handle)


def _cache_directories(prefix: str) -> tuple[str, str]:
    """List folders for tables: next to the data; else, as that may be read-only, in the temporary directory."""
    name = hashlib.sha256(os.path.abspath(prefix).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    own = os.path.join(tempfile.gettempdir(), f"megazero-index-cache-{os.getuid()}", name)
    return f"{prefix}_index_cache", own


def _trusted(directory: str) -> bool:
    """Return true if only those who may change the data may have put tables there.

    Beside the data, that is whoever may write there, unless all the world may. In the temporary directory,
    where everybody may make a folder of any name, it is this user alone.
    """
    beside = directory.endswith("_index_cache")
    for path in (directory,) if beside else (os.path.dirname(directory), directory):
        try:
            found = os.stat(path) if beside else os.lstat(path)
        except OSError:
            return False
        if not stat.S_ISDIR(found.st_mode) or found.st_mode & stat.S_IWOTH:
            return False
        if not beside and (found.st_uid != os.getuid() or found.st_mode & stat.S_IWGRP):
            return False
    return True


def _make_trusted(directory: str) -> bool:
    """Make a cache's folder, if it can be made; whether it is there and trusted."""
    try:
        if directory.endswith("_index_cache"):
            os.makedirs(directory, exist_ok=True)
        else:
            for path in (os.path.dirname(directory), directory):
                os.makedirs(path, mode=0o700, exist_ok=True)
    except OSError:
        return False
    return _trusted(directory)


def _checksum(flat: Int64s, check: int) -> int:
    for at in range(0, flat.shape[0], CHUNK):
        check = crc32(flat[at : at + CHUNK].data, check)
    return check


def _header(count: int) -> bytes:
    """The beginning of a .npy file of `count` int64."""
    text = io.BytesIO()
    np.lib.format.write_array_header_1_0(text, {"descr": "<i8", "fortran_order": False, "shape": (count,)})
    return text.getvalue()


def _read(directory: str, name: str, count: int, salt: int | None) -> Int64s | None:
    """The `count` numbers of a table file, memory-mapped; None unless it is there, whole and trustworthy.

    If `salt` is None, the checksum is not compared.

    The file's header is compared, not parsed: numpy's parser has an exception for every kind of damage.
    """
    if not _trusted(directory):
        return None
    head = _header(count + 1)
    try:
        with os.fdopen(open_regular(os.path.join(directory, name)), "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size != len(head) + 8 * (count + 1) or file.read(len(head)) != head:
                return None
            if not directory.endswith("_index_cache") and status.st_uid != os.getuid():
                return None
            if status.st_size <= RESIDENT_BYTES:
                flat: Int64s = np.frombuffer(file.read(), dtype="<i8")
            else:
                mapped = np.memmap(file, dtype="<i8", mode="r", offset=len(head), shape=(count + 1,))
                flat = mapped.view(np.ndarray)
    except (OSError, ValueError):
        return None
    if flat.shape != (count + 1,) or (salt is not None and flat[-1] != _checksum(flat[:-1], salt)):
        return None
    return flat[:-1]


def _write(directory: str, name: str, table: EpochTable, check: int) -> bool:
    """Store a table and its checksum, which begins at `check`, as one int64 array, atomically. False if that fails."""
    if not _make_trusted(directory):
        return False
    try:
        with replacing(os.path.join(directory, name), durable=False) as file:
            file.write(_header(sum(part.shape[0] for part in table) + 1))
            for part in table:
                for at in range(0, part.shape[0], STRETCH):
                    data = np.ascontiguousarray(part[at : at + STRETCH], dtype="<i8").data
                    check = crc32(data, check)
                    file.write(data)
            file.write(np.array([check], dtype="<i8").data)
    except OSError:
        return False
    return True
