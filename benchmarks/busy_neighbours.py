#!/usr/bin/env python3
"""Tokens per second of `pretrain_gpt.py --preset tiny`, alone and next to busy processes, by how long threads spin.

    python -m benchmarks.busy_neighbours --neighbours 4 --rounds 5

Every round runs each setting once, alone and next to the neighbours, in turns. The neighbours count in Python, a
thread each. megazero/environment.py has the setting that a run takes by default.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmarks.measure import interval

ROOT = Path(__file__).resolve().parent.parent
WARM_UP = 2  # iterations that are not measured
SETTINGS = {  # 300,000 is the default of GNU OpenMP
    "spins 300,000 times": {"GOMP_SPINCOUNT": "300000"},
    "1,000 (default here)": {},
    "never (OMP_WAIT_POLICY=PASSIVE)": {"OMP_WAIT_POLICY": "PASSIVE"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}


@dataclass(frozen=True)
class Options:
    """Tokens per second alone and next to busy processes."""

    neighbours: int = 4
    """Busy processes."""
    rounds: int = 5
    iters: int = 6
    """Iterations of a run, of which the first two are not measured."""


@contextmanager
def busy(number: int) -> Iterator[None]:
    """Run `number` processes that do nothing but compute, for as long as the context lasts."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def tokens_per_second(env: dict[str, str], iters: int) -> float:
    """Return the median over the measured iterations of one run."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    with tempfile.TemporaryDirectory() as folder:
        flags = "--preset tiny --vocab-size 257 --mock-data --lr-warmup-iters 0 --log-interval 1".split()
        command = [sys.executable, "pretrain_gpt.py", *flags, "--train-iters", str(iters), "--log-dir", folder]
        subprocess.run(command, cwd=ROOT, env=own | env, check=True, stdout=subprocess.DEVNULL)
        records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    speeds = [record["tokens_per_second"] for record in records if record.get("iteration", 0) > WARM_UP]
    return statistics.median(speeds)


def main(o: Options) -> None:
    found: dict[tuple[str, int], list[float]] = {(name, n): [] for name in SETTINGS for n in (0, o.neighbours)}
    for _ in range(o.rounds):
        for (name, neighbours), speeds in found.items():
            with busy(neighbours):
                speeds.append(tokens_per_second(SETTINGS[name], o.iters))
    print(f"| threads wait | alone, tokens/s | next to {o.neighbours} busy processes |\n|---|---|---|")
    for name in SETTINGS:
        cells = []
        for neighbours in (0, o.neighbours):
            speeds = found[name, neighbours]
            low, high = interval(speeds)
            cells.append(f"{statistics.median(speeds):,.0f} [{low:,.0f}, {high:,.0f}]")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main(tyro.cli(Options))
