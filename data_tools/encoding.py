"""Chunks to tokens in worker processes, in order, with a bounded number of chunks in memory."""

import ctypes
import functools
import hashlib
import importlib.util
import multiprocessing
import os
import resource
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

from data_tools.chat import Conversation, cached_template
from data_tools.documents import Bad, documents_of, text_of
from data_tools.reading import Chunk, read_chunks
from data_tools.selection import Selection
from data_tools.sources import Source
from megazero.data.indexed import Mask
from megazero.data.tokenizer import PROBE, FastTokenizer, TiktokenTokenizer, Tokenizer, load_tokenizer

# Chunks in flight for each worker: one that it encodes, and some that wait, so that no worker runs out of chunks
# while another encodes a long document.
CHUNKS_PER_WORKER = 4
# Bytes of text that may be in flight: bounds memory if single documents are huge.
WAITING_BYTES = 256 << 20
# Characters of a chunk that the tokenizer encodes too if gigatoken encodes the chunk.
SPOT_CHECK = 2000
# Text, and number of sources, on which gigatoken is compared with the tokenizer before it is used.
SAMPLE_CHARACTERS, SAMPLE_SOURCES = 1 << 16, 4

# Growth of a process in bytes at which gigatoken's tokenizer is made again.
CACHE_BYTES = 96 << 20

# One tokenizer per process, however many chunks it serves.
cached_tokenizer = functools.cache(load_tokenizer)


class GigatokenDiffers(Exception):
    """gigatoken gave other ids than the tokenizer that it replaces. `args`: the place in the text."""


@dataclass(frozen=True)
class Job:
    """Settings of a worker. `dtype`: name of the token type. `digests`: hash each document, for --dedup.

    bos: ids that begin each document.
    """

    tokenizer: str
    selection: Selection
    append_eod: bool
    dtype: str
    bos: tuple[int, ...] = ()
    gigatoken: bool = False
    digests: bool = False


@dataclass(frozen=True)
class Column:
    """The documents of a chunk in one corpus: `ids` one after another, `lengths` in tokens, 0 if empty.

    `mask`: whether each token counts as a target; None: the corpus has no mask.
    """

    ids: npt.NDArray[Any]
    lengths: npt.NDArray[np.int64]
    mask: Mask | None = None

    def select(self, kept: npt.NDArray[np.bool_]) -> "Column":
        """Select the documents for which `kept` is true."""
        if kept.all():
            return self
        tokens = np.repeat(kept, self.lengths)
        return Column(self.ids[tokens], self.lengths[kept], None if self.mask is None else self.mask[tokens])

    @classmethod
    def of_keys(cls, columns: Sequence["Column"], counted: Sequence[bool]) -> "Column":
        """Join the texts of each document, a column per key; `counted`: whether a key's tokens are targets."""
        lengths = np.stack([column.lengths for column in columns], axis=1)  # [documents, keys]
        owner = np.repeat(np.tile(np.arange(len(columns)), len(lengths)), lengths.ravel())  # the key of each token
        ids = np.empty(owner.size, np.int64)
        for key, column in enumerate(columns):
            ids[owner == key] = column.ids
        return cls(ids, lengths.sum(axis=1), np.array(counted)[owner])

    @classmethod
    def of_conversations(cls, found: Sequence[Conversation]) -> "Column":
        lengths = np.array([each.ids.size for each in found], np.int64)
        ids = np.concatenate([np.zeros(0, np.int64), *(each.ids for each in found)])
        return cls(ids, lengths, np.concatenate([np.zeros(0, np.bool_), *(each.mask for each in found)]))


@dataclass(frozen=True)
class Encoded:
    """One `Column` per corpus; the lines that are no documents; 16-byte hashes of the documents, uint64 [D, 2]."""

    columns: list[Column]
    bad: list[Bad]
    digests: npt.NDArray[np.uint64] | None


def encode_chunk(job: Job, chunk: Chunk) -> Encoded:
    """Encode all documents of a chunk."""
    bad, contents = list[Bad](), list[bytes]()
    encode = _conversations if job.selection.chat else _texts
    columns = [_finished(job, column) for column in encode(job, chunk, bad, contents)]
    digests = None
    if job.digests:
        raw = b"".join(hashlib.blake2b(content, digest_size=16).digest() for content in contents)
        digests = np.frombuffer(raw, np.uint64).reshape(-1, 2)
    return Encoded(columns, bad, digests)


def _conversations(job: Job, chunk: Chunk, bad: list[Bad], contents: list[bytes]) -> list[Column]:
    """Return a column per key; append the bad lines, and, for --dedup, the bytes of documents that are compared."""
    keys, found = job.selection.keys, list[tuple[Conversation, ...]]()
    for each in documents_of(chunk, keys, cached_template(job.tokenizer).encode):
        bad.append(each) if isinstance(each, Bad) else found.append(each)
    if job.digests:
        contents += [b"".join(part.ids.tobytes() + part.mask.tobytes() for part in each) for each in found]
    return [Column.of_conversations([each[k] for each in found]) for k in range(len(keys))]


def _texts(job: Job, chunk: Chunk, bad: list[Bad], contents: list[bytes]) -> list[Column]:
    """Return a column per key, or one of all keys; `bad`, `contents` as for `_conversations`."""
    keys, found = job.selection.keys, list[tuple[str, ...]]()
    for each in documents_of(chunk, keys, text_of):
        bad.append(each) if isinstance(each, Bad) else found.append(each)
    if job.digests:
        contents += ["\0".join(each).encode() for each in found]
    try:
        columns = [Column(*_encode(job, [each[k] for each in found], chunk)) for k in range(len(keys))]
    except (GigatokenDiffers, ValueError):
        raise
    except Exception as error:  # any exception of a tokenizer's library
        raise ValueError(f"{chunk.where(0)}: --tokenizer {job.tokenizer} fails on it: {error}") from error
    return [Column.of_keys(columns, job.selection.counted)] if job.selection.counted else columns


def _finished(job: Job, column: Column) -> Column:
    """Return the column in the type of the file, with beginnings and ends of documents."""
    column = _begun(column, job.bos) if job.bos else column
    ids, lengths, mask = column.ids, column.lengths, column.mask
    limits = np.iinfo(job.dtype)
    if ids.size and (int(ids.max()) > limits.max or int(ids.min()) < limits.min):
        raise ValueError(
            f"--dtype {job.dtype} cannot hold token id {int(ids.max())} of --tokenizer {job.tokenizer}; give a wider "
            f"one, or leave it out: then the vocabulary decides"
        )
    if ids.size and int(ids.max()) >= (size := cached_tokenizer(job.tokenizer).vocab_size):
        raise ValueError(
            f"--tokenizer {job.tokenizer}: its files have {size:,} tokens, and transformers gives the id "
            f"{int(ids.max())} to a special token that only its settings name; save the tokenizer again, so that "
            "tokenizer.json holds it"
        )
    ids = ids.astype(job.dtype, copy=False)
    if job.append_eod:
        full = lengths > 0
        ends = np.cumsum(lengths)[full]
        ids = np.insert(ids, ends, cached_tokenizer(job.tokenizer).eod)
        mask = None if mask is None else np.insert(mask, ends, mask[ends - 1])  # the end counts with the last token
        lengths = lengths + full
    if lengths.size and int(lengths.max()) > np.iinfo(np.int32).max:
        raise ValueError(f"a document has {int(lengths.max()):,} tokens, and the format holds 2^31 - 1; divide it")
    return Column(ids, lengths, mask)


def _begun(column: Column, bos: tuple[int, ...]) -> Column:
    """Return the column with `bos` before each document that has tokens and does not begin with it. It is no target."""
    ids, lengths, mask = column.ids, column.lengths, column.mask
    starts, missing = np.cumsum(lengths) - lengths, lengths > 0
    has = lengths >= len(bos)
    for k, number in enumerate(bos):
        has[has] = ids[starts[has] + k] == number
    missing &= ~has
    places = np.repeat(starts[missing], len(bos))
    ids = np.insert(ids.astype(np.int64), places, np.tile(bos, int(missing.sum())))
    mask = None if mask is None else np.insert(mask, places, False)
    return Column(ids, lengths + len(bos) * missing, mask)


def _encode(job: Job, texts: Sequence[str], chunk: Chunk) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    tokenizer = cached_tokenizer(job.tokenizer)
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
    """Resident memory of this process; its largest so far in a container without /proc."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


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


def sample_texts(sources: Sequence[Source], keys: Sequence[str]) -> list[str]:
    """Text from the beginning of a few sources, the first and the last among them; none from a stream."""
    files = [source for source in sources if source.kind not in ("stream", "stdin", "stdin-text")]
    chosen = sorted({len(files) * k // SAMPLE_SOURCES for k in range(SAMPLE_SOURCES)} | {len(files) - 1})
    texts: list[str] = []
    for source in (files[k] for k in chosen if 0 <= k < len(files)):
        taken = 0
        chunk = next(read_chunks([source], keys), None)
        for document in documents_of(chunk, keys, text_of) if chunk else ():
            if not isinstance(document, Bad):
                texts += [text[: SAMPLE_CHARACTERS - taken] for text in document]
                taken += sum(map(len, document))
            if taken >= SAMPLE_CHARACTERS:
                break
    return texts


def trust_gigatoken(spec: str, samples: Sequence[str]) -> str:
    """Compare gigatoken with the tokenizer of `spec` on a probe and on samples; the reason not to use it, or ""."""
    fast = fast_tokenizer(spec)
    if fast is None:
        known = importlib.util.find_spec("gigatoken") is not None
        return "it does not know this tokenizer" if known else "it is not installed (`pip install gigatoken`)"
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
