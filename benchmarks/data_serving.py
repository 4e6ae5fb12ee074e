"""Serving at scale: tables of 10 M documents, a blend of 10,000 corpora, the loader's share of a training step.

    python -m benchmarks.data_serving

Each part runs in a process of its own; CPU seconds and the highest resident memory are the process's.
"""

from __future__ import annotations

import contextlib
import io
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import tyro

from megazero.data.indexed import HEADER, MAGIC, VERSION

ROOT = Path(__file__).resolve().parents[1]
SEQ_LENGTH = 1024


def write_index(prefix: Path, lengths: np.ndarray) -> None:
    """A corpus of zeros: an index, and a file of tokens that takes no space."""
    offsets = np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64)]) * 2
    with open(f"{prefix}.idx", "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, 8, lengths.size, lengths.size + 1))
        for table, kind in ((lengths, "<i4"), (offsets, "<i8"), (np.arange(lengths.size + 1), "<i8")):
            file.write(table.astype(kind).tobytes())
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(int(lengths.sum(dtype=np.int64)) * 2)


def tables(folder: Path, documents: int, epochs: int) -> str:
    """Compute and store the tables of `epochs` epochs."""
    from megazero.data import epochs as module
    from megazero.data.samples import GPTDataset

    write_index(folder / "large", np.random.default_rng(0).integers(100, 1100, documents).astype(np.int32))
    before = resource.getrusage(resource.RUSAGE_SELF)
    start, cpu = time.perf_counter(), time.process_time()
    dataset = GPTDataset(folder / "large", "1", "train", SEQ_LENGTH, seed=1)
    opened = time.process_time() - cpu
    for epoch in range(epochs):
        module.load_table(dataset.data, dataset._key, epoch)
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    samples = epochs * dataset.num_tokens // SEQ_LENGTH
    return (
        f"{documents:,} documents, {epochs} epochs, {samples:,} samples: {cpu:.1f} CPU seconds ({opened:.1f} to open "
        f"and check), {wall:.1f} of wall clock; peak {peak:,.0f} MiB ({before.ru_maxrss / 1024:,.0f} before)"
    )


def blend(folder: Path, count: int) -> str:
    """Open `count` corpora, and read samples of the blend."""
    from megazero.data.corpora import open_datasets

    draw = np.random.default_rng(0)
    words = []
    for k in range(count):
        prefix = folder / f"c{k}"
        write_index(prefix, draw.integers(100, 1100, 1000).astype(np.int32))
        words += [str(draw.integers(1, 1000)), str(prefix)]
    start, cpu = time.perf_counter(), time.process_time()
    data = open_datasets(words, "969,30,1", SEQ_LENGTH, 1, 257)
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    start, first = time.perf_counter(), time.process_time()
    for i in range(2000):
        data.train[i]
    first = time.process_time() - first
    again = time.process_time()
    for i in range(2000):
        data.train[i]
    again = time.process_time() - again
    return (
        f"{count:,} corpora of 1,000 documents: open in {cpu:.1f} CPU seconds, {wall:.1f} of wall clock; a sample "
        f"takes {first / 2000 * 1e3:.2f} ms (most of them a corpus's first), {again / 2000 * 1e3:.2f} ms later"
    )


def loader(folder: Path, workers: int) -> str:
    """The share of a step that a run waits for its batch: the tiny preset's model on random bytes."""
    import pretrain_gpt
    from megazero.data.loader import Batches
    from megazero.data.writer import IndexedWriter

    prefix = folder / f"bytes{workers}"
    with IndexedWriter(prefix, np.uint16) as writer:
        for _ in range(200):
            writer.add(np.random.default_rng(0).integers(0, 256, 5000))
    spent: list[float] = []
    read = Batches.batch

    def timed(self: Batches, consumed: int):
        start = time.perf_counter()
        found = read(self, consumed)
        spent.append(time.perf_counter() - start)
        return found

    Batches.batch = timed  # type: ignore[method-assign]
    flags = f"--preset tiny --data-path {prefix} --tokenizer byte --train-iters 30 --lr-warmup-iters 0"
    flags += " --split 1 --eval-interval 0"
    with contextlib.redirect_stdout(io.StringIO()):
        pretrain_gpt.main([*flags.split(), "--log-dir", str(folder / "log"), "--num-workers", str(workers)])
    lines = (folder / "log" / "metrics.jsonl").read_text().splitlines()[5:]  # the first steps start the workers
    steps = sorted(json.loads(line)["step_seconds"] for line in lines)
    step, wait = steps[len(steps) // 2], sorted(spent[5:])[len(spent[5:]) // 2]
    return f"--num-workers {workers}: {wait * 1e3:.2f} ms of a step of {step * 1e3:.0f} ms: {wait / step:.2%}"


def main(
    part: str = "", documents: int = 10_000_000, epochs: int = 10, corpora: int = 10_000, workers: int = 1
) -> None:
    """Run a part (tables, blend, loader), or all, each in a process of its own."""
    if part:
        with tempfile.TemporaryDirectory(prefix="data-serving-") as name:
            folder = Path(name)
            work = {
                "tables": lambda: tables(folder, documents, epochs),
                "blend": lambda: blend(folder, corpora),
                "loader": lambda: loader(folder, workers),
            }[part]
            print(f"{part}: {work()}", flush=True)
        return
    sizes = [f"--documents={documents}", f"--epochs={epochs}", f"--corpora={corpora}"]
    for words in (["tables"], ["blend"], ["loader", "--workers=0"], ["loader", "--workers=1"]):
        command = [sys.executable, "-m", "benchmarks.data_serving", "--part", words[0], *words[1:], *sizes]
        subprocess.run(command, cwd=ROOT, check=True)


if __name__ == "__main__":
    tyro.cli(main)
