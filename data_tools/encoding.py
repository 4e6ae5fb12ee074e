"""Chunks to tokens in worker processes, in order, with a bounded number of chunks in memory."""

import ctypes
import functools
import hashlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

import numpy as np
import numpy.typing as npt

from data_tools.documents import Bad, documents_of
from data_tools.reading import Chunk
from megazero.data.tokenizer import PROBE, FastTokenizer, TiktokenTokenizer, Tokenizer, load_tokenizer

# Chunks in flight for each worker: one that it encodes, and some that wait, so that no worker runs out of chunks
# while another encodes a long document.
CHUNKS_PER_WORKER = 4
# Bytes of text that may be in flight: bounds memory if single documents are huge.
WAITING_BYTES = 256 << 20
# Characters of a chunk that the tokenizer encodes too if gigatoken encodes the chunk.
SPOT_CHECK = 2000

# Growth of a process in bytes at which gigatoken's tokenizer is made again.
CACHE_BYTES = 96 << 20

# One tokenizer per process, however many chunks it serves.
cached_tokenizer = functools.cache(load_tokenizer)


class GigatokenDiffers(Exception):
    """gigatoken gave other ids than the tokenizer that it replaces. `args`: the place in the text."""


@dataclass(frozen=True)
class Job:
    """Settings of a worker. `dtype`: name of the token type. `digests`: hash each document, for --dedup."""

    tokenizer: str
    keys: tuple[str, ...]
    append_eod: bool
    dtype: str
    gigatoken: bool = False
    digests: bool = False


@dataclass(frozen=True)
class Column:
    """The documents of a chunk under one key: `ids` one after another, `lengths` in tokens, 0 if empty."""

    ids: npt.NDArray[Any]
    lengths: npt.NDArray[np.int64]

    def select(self, kept: npt.NDArray[np.bool_]) -> "Column":
        """Select the documents for which `kept` is true."""
        if kept.all():
            return self
        return Column(self.ids[np.repeat(kept, self.lengths)], self.lengths[kept])


@dataclass(frozen=True)
class Encoded:
    """One `Column` per key; the lines that are no documents; 16-byte hashes of the documents, uint64 [D, 2]."""

    columns: list[Column]
    bad: list[Bad]
    digests: npt.NDArray[np.uint64] | None


def encode_chunk(job: Job, chunk: Chunk) -> Encoded:
    """Encode all documents of a chunk."""
    found = list(documents_of(chunk, job.keys))
    bad = [each for each in found if isinstance(each, Bad)]
    documents = [each for each in found if not isinstance(each, Bad)]
    tokenizer = cached_tokenizer(job.tokenizer)
    columns = []
    for k in range(len(job.keys)):
        texts = [document[k] for document in documents]
        try:
            ids, lengths = _encode(job, tokenizer, texts, chunk)
            columns.append(_column(job, tokenizer, ids, lengths))
        except (GigatokenDiffers, ValueError):
            raise
        except Exception as error:  # any exception of a tokenizer's library
            raise ValueError(f"{chunk.where(0)}: --tokenizer {job.tokenizer} fails on it: {error}") from error
    digests = None
    if job.digests:
        raw = b"".join(hashlib.blake2b("\0".join(texts).encode(), digest_size=16).digest() for texts in documents)
        digests = np.frombuffer(raw, np.uint64).reshape(-1, 2)
    return Encoded(columns, bad, digests)


def _column(job: Job, tokenizer: Tokenizer, ids: npt.NDArray[Any], lengths: npt.NDArray[np.int64]) -> Column:
    limits = np.iinfo(job.dtype)
    if ids.size and (int(ids.max()) > limits.max or int(ids.min()) < limits.min):
        raise ValueError(
            f"--dtype {job.dtype} cannot hold token id {int(ids.max())} of --tokenizer {job.tokenizer}; give a wider "
            f"one, or leave it out: then the vocabulary decides"
        )
    ids = ids.astype(job.dtype, copy=False)
    if job.append_eod:
        full = lengths > 0
        ids = np.insert(ids, np.cumsum(lengths)[full], tokenizer.eod)
        lengths = lengths + full
    if lengths.size and int(lengths.max()) > np.iinfo(np.int32).max:
        raise ValueError(f"a document has {int(lengths.max()):,} tokens, and the format holds 2^31 - 1; divide it")
    return Column(ids, lengths)


def _encode(
    job: Job, tokenizer: Tokenizer, texts: Sequence[str], chunk: Chunk
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    if not job.gigatoken:
        return tokenizer.encode_flat(texts)
    fast = fast_tokenizer(job.tokenizer)
    assert fast is not None
    if texts:
        # The chunk's place decides which stretch is compared, so that a resumed run compares the same.
        draw = int.from_bytes(hashlib.blake2b(f"{chunk.source.name} {chunk.at}".encode("utf-8", "replace")).digest())
        text = texts[draw % len(texts)]
        start = draw // len(texts) % max(1, len(text) - SPOT_CHECK)
        check_same(fast, tokenizer, [text[start : start + SPOT_CHECK]], chunk.where(0))
    return fast.encode(texts)


# -- gigatoken


class BoundedGigatoken:
    """gigatoken's tokenizer, made again when the process has grown by `CACHE_BYTES`.

    It caches every word and never evicts one: 7 bytes per byte of text if all words differ. Making it again takes a
    quarter of a second, and starts with an empty cache.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._renew()

    def _renew(self) -> None:
        self._tokenizer: Any = None  # free the old one before making a new one
        return_free_memory()
        self._tokenizer = self._make()
        self._limit = resident_bytes() + CACHE_BYTES

    def encode(self, texts: Sequence[str]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """Encode like `Tokenizer.encode_flat`, on this thread."""
        if resident_bytes() > self._limit:
            self._renew()
        layout = self._tokenizer.encode_batch([text.encode() for text in texts], parallel=False).layout
        offsets = np.asarray(layout.offsets.data).astype(np.int64)
        return np.asarray(layout.content.data)[offsets[0] : offsets[-1]], np.diff(offsets)


def return_free_memory() -> None:
    """Return freed memory to the system, if the allocator is glibc's, which else keeps fragments of it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@functools.cache
def fast_tokenizer(spec: str) -> BoundedGigatoken | None:
    """gigatoken's tokenizer of a SPEC; None if gigatoken is not installed, or cannot read this tokenizer."""
    tokenizer = cached_tokenizer(spec)
    try:
        import gigatoken

        if isinstance(tokenizer, FastTokenizer):
            content = tokenizer.json
            return BoundedGigatoken(lambda: gigatoken.Tokenizer.from_json(content))
        if isinstance(tokenizer, TiktokenTokenizer):  # known by the name of its file
            path = spec.partition(":")[2]
            return BoundedGigatoken(lambda: gigatoken.Tokenizer.from_tiktoken(path, special_tokens={}))
        return None
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException:  # a panic of a Rust library is no Exception
        return None


def check_same(fast: BoundedGigatoken, tokenizer: Tokenizer, texts: Sequence[str], where: str) -> None:
    """Raise GigatokenDiffers unless both tokenizers give the same ids."""
    ids, lengths = fast.encode(texts)
    expected, expected_lengths = tokenizer.encode_flat(texts)
    if not (np.array_equal(ids, expected) and np.array_equal(lengths, expected_lengths)):
        raise GigatokenDiffers(where)


def trust_gigatoken(spec: str, samples: Sequence[str]) -> str:
    """Compare gigatoken with the tokenizer of `spec` on a probe and on samples; the reason not to use it, or ""."""
    fast = fast_tokenizer(spec)
    if fast is None:
        return "it does not know this tokenizer"
    try:
        check_same(fast, cached_tokenizer(spec), [*PROBE, *samples], "")
    except GigatokenDiffers:
        return "it gives other ids on a sample of the text"
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        return f"it fails on a sample of the text: {error}"
    return ""


# -- workers

INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def deferring_interrupts() -> Iterator[None]:
    """Delay interrupts until the block has ended. For the main thread; a process started in the block blocks them.

    Note [an interrupt while the pool starts]: `ProcessPoolExecutor.submit` starts the workers first and then the
    thread that ends them. After an exception in between, `shutdown` does nothing, and at exit Python waits for workers
    that wait for work: the tool hangs. Ctrl-C, which reaches the whole process group, also kills a worker whose
    `start_worker` has not run yet.
    """
    caught = list[int]()
    # Blocking alone is not enough: another thread receives the signal, and Python handles it on the main thread.
    handlers = {each: signal.signal(each, lambda number, _: caught.append(number)) for each in INTERRUPTS}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for each, handler in handlers.items():
            signal.signal(each, handler)
        for number in caught:
            signal.raise_signal(number)


def start_worker() -> None:
    """Set up a worker process: it uses one core, and ends with the tool."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the tool handles it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTS)  # deferred when the tool started this process
    parent = multiprocessing.parent_process()
    if parent is not None:
        # A worker waits on a pipe that it holds open itself, so that the end of the tool would not wake it.
        def follow(sentinel: int = parent.sentinel) -> None:
            connection.wait([sentinel])
            os._exit(1)

        threading.Thread(target=follow, daemon=True).start()


def encode_all(job: Job, chunks: Iterator[Chunk], workers: int) -> Iterator[tuple[Chunk, Encoded]]:
    """Yield every chunk with its tokens, in order; bounds the chunks, and the bytes, in memory."""
    if workers == 1:
        for chunk in chunks:
            yield chunk, encode_chunk(job, chunk)
        return
    context = multiprocessing.get_context("spawn")  # no copy of the tool's threads and buffers
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=start_worker)
    waiting: deque[tuple[Chunk, Future[Encoded]]] = deque()
    size = 0
    try:
        for chunk in chunks:
            with deferring_interrupts():
                waiting.append((chunk, pool.submit(encode_chunk, job, chunk)))
            size += len(chunk.raw)
            while len(waiting) >= workers * CHUNKS_PER_WORKER or (size > WAITING_BYTES and waiting):
                first, future = waiting.popleft()
                encoded = future.result()
                size -= len(first.raw)
                yield first, encoded
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
    except BrokenProcessPool as error:
        raise ValueError(
            f"--workers {workers}: a worker died (most often: out of memory); give fewer workers"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
