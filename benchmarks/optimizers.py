#!/usr/bin/env python3
"""Train the quickstart's model with several optimizers and seeds: losses at equal steps and at equal CPU time.

One process of one thread per run; a run that is already whole is not trained again. CPU time is that of the whole run.
Draws docs/pictures/optimizers.svg. Example:

    bash scripts/quickstart.sh && python -m benchmarks.optimizers
    python -m benchmarks.optimizers --runs adamw lion --seeds 1 --train-iters 200
    python -m benchmarks.optimizers --runs adamw "adamw, bf16 moments" "adamw, int8 moments" --output small-states.svg
"""

import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
RUNS = Path("runs/optimizers")
QUICKSTART = Path("runs/quickstart")
OPTIMIZERS = {
    "adamw": "",
    "muon": "--optimizer muon",
    "muon, half the rate": "--optimizer muon --lr 1.5e-3",
    "lion": "--optimizer lion --lr 5e-4 --weight-decay 0.6 --adam-beta2 0.99",
}
SMALL = {
    "adamw, bf16 moments": "--adam-moments bf16",
    "adamw, int8 moments": "--adam-moments int8",
    "muon, int8 moments": "--optimizer muon --adam-moments int8",
}


@dataclass(frozen=True)
class Options:
    """Train the quickstart's model with several optimizers, and compare losses."""

    runs: tuple[str, ...] = tuple(OPTIMIZERS)
    """Names in OPTIMIZERS, and in SMALL."""
    seeds: int = 3
    """Runs of each."""
    train_iters: int = 800
    """Iterations of each run, of 2,048 tokens."""
    output: Path = Path("docs/pictures/optimizers.svg")
    """Picture to write."""


class Trained(NamedTuple):
    """Validation losses of a run by iteration, and CPU seconds of an iteration."""

    losses: dict[int, float]
    seconds: float


def train(name: str, seed: int, iterations: int) -> Trained:
    folder = RUNS / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}-{iterations}"
    done = folder / "seconds.json"
    if not done.exists():
        flags = f"--preset scripts/presets/quickstart.toml --data-path {QUICKSTART}/shakespeare_text_document"
        flags += f" --tokenizer {QUICKSTART}/tokenizer --seed {seed} --train-iters {iterations} --log-dir {folder}"
        flags += f" --save-interval 0 --keep-last 0 --eval-iters 50 --lr-decay-iters {iterations} "
        flags += (OPTIMIZERS | SMALL)[name]
        before = os.times().children_user
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "pretrain_gpt.py", *flags.split()]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
        done.write_text(json.dumps((os.times().children_user - before) / iterations))
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = {each["iteration"]: each["validation_loss"] for each in records if "validation_loss" in each}
    return Trained(losses, json.loads(done.read_text()))


def iterations_to(losses: dict[int, float], wanted: float) -> float:
    """Return the iteration at which a curve reaches a loss, between two evaluations; infinite if it never does."""
    before = None
    for at, loss in losses.items():
        if loss <= wanted:
            return at if before is None else before[0] + (at - before[0]) * (before[1] - wanted) / (before[1] - loss)
        before = at, loss
    return float("inf")


def draw(found: dict[str, list[Trained]], output: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, (by_step, by_time) = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for number, (name, runs) in enumerate(found.items()):
        for which, run in enumerate(runs):
            steps, label = list(run.losses), name if not which else None
            for axes, xs in ((by_step, steps), (by_time, [step * run.seconds for step in steps])):
                axes.plot(xs, list(run.losses.values()), color=f"C{number}", linewidth=1, label=label)
    by_step.set(xlabel="iteration", ylabel="validation loss")
    by_time.set(xlabel="CPU seconds")
    by_step.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(output, metadata={"Date": None})


def main(o: Options) -> None:
    os.chdir(ROOT)
    if not Path(f"{QUICKSTART}/shakespeare_text_document.idx").exists():
        raise SystemExit("the corpus is missing; run: bash scripts/quickstart.sh")
    jobs = [(name, seed) for seed in range(1, o.seeds + 1) for name in o.runs]
    found: dict[str, list[Trained]] = {name: [] for name in o.runs}
    for name, seed in track(jobs, "runs"):
        found[name].append(train(name, seed, o.train_iters))
    first = found[o.runs[0]]
    table = Table(title=f"{o.train_iters} iterations, {o.seeds} seeds: mean (lowest to highest)")
    reached = f"iterations to the last loss of {o.runs[0]}"
    for column in ("optimizer", "validation loss", "CPU ms per iteration", reached, f"CPU time / {o.runs[0]}'s"):
        table.add_column(column)
    for name, runs in found.items():
        last = [run.losses[o.train_iters] for run in runs]
        steps = [iterations_to(run.losses, base.losses[o.train_iters]) for run, base in zip(runs, first, strict=True)]
        times = [
            each * run.seconds / (o.train_iters * base.seconds)
            for each, run, base in zip(steps, runs, first, strict=True)
        ]
        ms = statistics.mean(1000 * run.seconds for run in runs)
        spread = f"{statistics.mean(last):.3f} ({min(last):.3f} to {max(last):.3f})"
        table.add_row(name, spread, f"{ms:.0f}", f"{statistics.mean(steps):.0f}", f"{statistics.mean(times):.2f}")
    Console(width=120).print(table)
    draw(found, o.output)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
