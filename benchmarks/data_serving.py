"""Serving at scale: tables of 10 M documents, a blend of 10,000 corpora, the loader's share of a training step.

    python -m benchmarks.data_serving

Each part runs in a process of its own; CPU seconds and the highest resident memory are the process's.
"""

import contextlib
import functools
import importlib.util
import io
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from benchmarks.measure import interval
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


MODELS = {
    "small": "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --micro-batch-size 8 --global-batch-size 16",
    "medium": "--num-layers 6 --hidden-size 256 --num-attention-heads 4 --micro-batch-size 4 --global-batch-size 4",
}
SETTLED = 3  # rounds of a run that are not measured
ALONE = 300  # steps that are read without training


def readers_of(before: str) -> dict[str, Callable[..., Any]]:
    """The loader with 0, 1 and 2 threads, and one of another revision, in the file `before`, with one worker."""
    from megazero.data.loader import Batches

    readers = {f"{number} threads": functools.partial(Batches, num_workers=number) for number in (0, 1, 2)}
    if before:
        spec = importlib.util.spec_from_file_location("before", before)
        assert spec is not None and spec.loader is not None, before
        module = sys.modules["before"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        readers["before"] = functools.partial(module.Batches, num_workers=1)
    return readers


def alone(batches: Any) -> tuple[float, float]:
    """Return seconds of a loader's first step, and samples per second of later ones, without training."""
    size, start = batches.assignment.sizes.at(0), time.perf_counter()
    batches.batch(0)
    begun = time.perf_counter()
    for step in range(1, ALONE):
        batches.batch(step * size)
    batches.close()
    return begun - start, (ALONE - 1) * size / (time.perf_counter() - begun)


def loader(folder: Path, model: str, rounds: int, before: str) -> str:
    """Samples per second of the loader alone, and its cost to training steps, by readers that take turns in a run."""
    import pretrain_gpt
    from megazero.data.writer import IndexedWriter
    from megazero.run import trainer

    draw = np.random.default_rng(0)
    with IndexedWriter(folder / "bytes", np.uint16) as writer:
        for length in draw.integers(100, 1100, 2000):
            writer.add(draw.integers(0, 256, length))
    readers = readers_of(before)
    draws = random.Random(0)
    order = [k for _ in range(rounds) for k in draws.sample(range(len(readers)), len(readers))]  # of the run's steps
    waits: list[float] = []
    unloaded: list[tuple[float, float]] = []

    class Turns:
        """The batches of a run: in each round of steps, one of each reader, which reads all of its samples in order."""

        def __init__(self, *args: Any, num_workers: int, **kwargs: Any) -> None:
            self.all, self.turns = [make(*args, **kwargs) for make in readers.values()], [0] * len(readers)
            if num_workers:  # training
                unloaded.extend(map(alone, self.all))

        def batch(self, consumed: int) -> Any:
            k, start = order[len(waits)], time.perf_counter()
            found = self.all[k].batch(self.turns[k] * self.all[k].assignment.sizes.at(0))
            waits.append(time.perf_counter() - start)
            self.turns[k] += 1
            return found

        def close(self) -> None:
            for each in self.all:
                each.close()

    trainer.Batches = Turns  # type: ignore[misc, assignment]
    flags = f"{MODELS[model]} --seq-length 256 --data-path {folder / 'bytes'} --tokenizer byte --split 1"
    flags += f" --eval-interval 0 --lr-warmup-iters 0 --log-dir {folder / 'log'}"
    with contextlib.redirect_stdout(io.StringIO()):
        pretrain_gpt.main([*flags.split(), "--train-iters", str(len(order))])
    records = [json.loads(line) for line in (folder / "log" / "metrics.jsonl").read_text().splitlines()]
    of_round = np.argsort(np.array(order).reshape(rounds, -1), axis=-1)  # steps of a round, by reader
    paces = np.array([record["tokens_per_second"] for record in records]).reshape(rounds, -1)
    paces = np.take_along_axis(paces, of_round, axis=-1)[SETTLED:]
    waited = np.take_along_axis(np.array(waits).reshape(rounds, -1), of_round, axis=-1)[SETTLED:]
    lines = [f"{model} model, {rounds} rounds"]
    for k, name in enumerate(readers):
        ratios = paces[:, k] / paces[:, 0]
        low, high = interval(ratios.tolist())
        first, speed = unloaded[k]
        lines.append(
            f"  {name}: {speed:,.0f} samples/s alone, after {1e3 * first:.1f} ms for the first step; "
            f"{np.median(paces[:, k]):,.0f} tokens/s, {np.median(ratios):.3f} [{low:.3f}, {high:.3f}] of those with 0 "
            f"threads; a step waits {1e3 * np.median(waited[:, k]):.2f} ms"
        )
    return "\n".join(lines)


def main(
    part: str = "",
    documents: int = 10_000_000,
    epochs: int = 10,
    corpora: int = 10_000,
    model: str = "small",
    rounds: int = 100,
    before: str = "",
) -> None:
    """Run a part (tables, blend, loader), or all, each in a process of its own.

    Args:
        model: of the loader's run, small or medium.
        before: loader.py of another revision, whose reader with one worker takes turns too.
    """
    if part:
        with tempfile.TemporaryDirectory(prefix="data-serving-") as name:
            folder = Path(name)
            work = {
                "tables": lambda: tables(folder, documents, epochs),
                "blend": lambda: blend(folder, corpora),
                "loader": lambda: loader(folder, model, rounds, before),
            }[part]
            print(f"{part}: {work()}", flush=True)
        return
    sizes = [f"--documents={documents}", f"--epochs={epochs}", f"--corpora={corpora}", f"--rounds={rounds}"]
    sizes += [f"--before={before}"]
    for words in (["tables"], ["blend"], *(["loader", f"--model={name}"] for name in MODELS)):
        command = [sys.executable, "-m", "benchmarks.data_serving", "--part", words[0], *words[1:], *sizes]
        subprocess.run(command, cwd=ROOT, check=True)


if __name__ == "__main__":
    tyro.cli(main)
