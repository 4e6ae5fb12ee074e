"""Turn text into the .bin/.idx token files that megazero and Megatron-LM train on."""

import argparse
import functools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from types import FrameType

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data_tools.documents import (
    Chunk,
    check_inputs,
    check_workers,
    progress_bar,
    read_chunks,
    run_tool,
    texts_of,
)
from megazero.data.indexed import dtype_for
from megazero.data.tokenizer import SPECS, load_tokenizer
from megazero.data.writer import IndexedWriter

EPILOG = f"""\
SPEC is {SPECS}.
A document that is empty, or has no token, is left out and counted.

example:
  python data_tools/preprocess_data.py --input wiki.jsonl news.jsonl.gz --output-prefix data/corpus \\
      --tokenizer gpt2:gpt2_files --append-eod --workers 8
  python pretrain_gpt.py --data-path data/corpus_text_document --tokenizer gpt2:gpt2_files ...
"""
# Chunks in flight for each worker: one at work, and some that wait, so that a slow document stops nobody.
CHUNKS_PER_WORKER = 4

# One tokenizer per process, however many chunks it serves.
cached_tokenizer = functools.cache(load_tokenizer)


@dataclass(frozen=True)
class Job:
    """What a worker does to every chunk."""

    tokenizer: str
    keys: tuple[str, ...]
    append_eod: bool


@dataclass(frozen=True)
class Encoded:
    """The documents of a chunk under one key: `ids` one after another, `lengths` int32 in tokens."""

    ids: npt.NDArray[np.integer]
    lengths: npt.NDArray[np.int32]
    num_empty: int


def encode_chunk(job: Job, chunk: Chunk) -> list[Encoded]:
    """One `Encoded` per key. ValueError as `texts_of`."""
    tokenizer = cached_tokenizer(job.tokenizer)
    documents = list(texts_of(chunk, job.keys))
    ending = [tokenizer.eod] if job.append_eod else []
    columns = []
    for k in range(len(job.keys)):
        encoded = tokenizer.encode_batch([document[k] for document in documents])
        full = [ids + ending for ids in encoded if ids]
        lengths = np.fromiter(map(len, full), dtype=np.int32, count=len(full))
        ids = np.concatenate([np.zeros(0, np.int64), *full]).astype(dtype_for(tokenizer.vocab_size))
        columns.append(Encoded(ids, lengths, len(encoded) - len(full)))
    return columns


def start_worker() -> None:
    """Set up a worker process: it works on one core, and never outlives the tool."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the tool decides
    parent = multiprocessing.parent_process()
    if parent is not None:
        # A worker waits on a pipe that it holds open itself, so the tool's death alone would not wake it.
        def follow(sentinel: int = parent.sentinel) -> None:
            connection.wait([sentinel])
            os._exit(1)

        threading.Thread(target=follow, daemon=True).start()


def encode_all(job: Job, inputs: Sequence[str], workers: int) -> Iterator[tuple[Chunk, list[Encoded]]]:
    """Every chunk of `inputs` with its tokens, in order, with a bounded number of chunks in memory."""
    chunks = read_chunks(inputs)
    if workers == 1:
        for chunk in chunks:
            yield chunk, encode_chunk(job, chunk)
        return
    context = multiprocessing.get_context("spawn")  # no copy of the tool's threads and buffers
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=start_worker)
    waiting: deque[tuple[Chunk, Future[list[Encoded]]]] = deque()
    try:
        for chunk in chunks:
            waiting.append((chunk, pool.submit(encode_chunk, job, chunk)))
            if len(waiting) >= workers * CHUNKS_PER_WORKER:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
    except BrokenProcessPool as error:
        raise ValueError(
            f"--workers {workers}: a worker died (most often: out of memory); give fewer workers"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """ValueError for what is wrong, before any work starts."""
    parser = argparse.ArgumentParser(
        prog="preprocess_data.py",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="JSON lines, one object a document (.jsonl, .json), or text, one file a document (.txt, .md); "
        "each may be .gz",
    )
    add("--output-prefix", required=True, metavar="P", help="writes P_<key>_document.bin, .idx and .json")
    add("--tokenizer", required=True, metavar="SPEC", help="see below")
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="a corpus for each (default: text)")
    add("--append-eod", action="store_true", help="end each document with the tokenizer's end of document")
    add("--workers", type=int, default=1, metavar="N", help="processes that tokenize (default: 1)")
    given = parser.parse_args(arguments)
    check_workers(given.workers)
    return given


def preprocess(given: argparse.Namespace) -> list[IndexedWriter]:
    """Write the corpora, one per key; returns their writers, which know the counts.

    Output is in the order of the input whatever --workers is. An exception leaves no corpus behind, not
    even a part of one, and no older corpus damaged.
    """
    total = check_inputs(given.input, given.json_keys)
    tokenizer = cached_tokenizer(given.tokenizer)
    if given.append_eod:
        assert tokenizer.eod >= 0  # raises here if there is none, not in the first worker
    job = Job(given.tokenizer, tuple(given.json_keys), given.append_eod)
    about = {
        "tokenizer": given.tokenizer,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod if given.append_eod else None,
    }
    start, text_bytes, num_empty = time.monotonic(), 0, [0] * len(job.keys)
    with ExitStack() as stack:
        writers = [
            stack.enter_context(
                IndexedWriter(f"{given.output_prefix}_{key}_document", dtype_for(tokenizer.vocab_size), about)
            )
            for key in job.keys
        ]
        advance = stack.enter_context(progress_bar("tokenizing", total))
        for chunk, columns in encode_all(job, given.input, given.workers):
            for k, column in enumerate(columns):
                writers[k].add_batch(column.ids, column.lengths)
                num_empty[k] += column.num_empty
            text_bytes += chunk.text_bytes
            advance(chunk)
        for key, writer in zip(job.keys, writers, strict=True):
            if writer.num_documents == 0:
                raise ValueError(f"--input {' '.join(given.input)}: no document has any text under {key!r}")
    seconds = time.monotonic() - start
    for writer, empty in zip(writers, num_empty, strict=True):
        print(
            f"{writer.prefix}: {writer.num_documents:,} documents, {writer.num_tokens:,} tokens, "
            f"{writer.dtype.name}; {empty:,} empty documents left out"
        )
    print(f"{text_bytes / 1e6:,.1f} MB in {seconds:.1f} s: {text_bytes / 1e6 / seconds:.2f} MB/s")
    return writers


def stop(number: int, frame: FrameType | None) -> None:
    """SIGTERM as an exception, so that half-written files are removed."""
    raise KeyboardInterrupt


def main(arguments: Sequence[str]) -> None:
    """The tool: parse, then work."""
    given = parse_arguments(arguments)
    signal.signal(signal.SIGTERM, stop)
    preprocess(given)


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # --workers 1 is one core, too
    run_tool(main)
