#!/usr/bin/env python3
"""Elastic runs on this machine: nodes of one rank that are killed, and come back.

    python benchmarks/elastic.py stress            4 nodes, one killed every 20 s for 10 minutes
    python benchmarks/elastic.py times --rounds 5  seconds from a kill to the next step, next to plain torchrun

`stress` fails unless each step is logged once, with the samples and the loss of a run that nothing disturbed, and no
generation repeats more steps than two intervals of checkpoints: a copy in flight does not count.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.helpers.elastic import ElasticRun
from tests.helpers.programs import ROOT

MODEL = "--mock-data --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 257 --seed 5"
# At --lr 1e-3 AdamW blows up rounding after 2,100 iterations, in two undisturbed layouts too: to 5e-6, then 1e-3.
TRAINING = "--global-batch-size 12 --lr 1e-4 --log-interval 1 --precision fp64 --init-method-std 0.05"
NEVER = 10**6
LIMIT = 1e-10  # largest relative difference of losses in fp64


@dataclass(frozen=True)
class Stress:
    """Kill nodes at random, and compare the curve with that of a run that nothing disturbed."""

    minutes: float = 10.0
    """Length of the run."""
    nodes: int = 4
    """MAX; MIN is 1."""
    every: float = 20.0
    """Seconds between kills."""
    interval: int = 10
    """Iterations between checkpoints in memory, or on the disk with --disk."""
    disk: bool = False
    """Save to the disk alone."""
    seed: int = 0
    """The choice of nodes and moments."""


@dataclass(frozen=True)
class Times:
    """Measure the seconds from a kill of one of three nodes to the next step of the others."""

    rounds: int = 5
    """Kills of each kind; the kinds take turns."""
    interval: int = 10
    """Iterations between checkpoints."""
    kinds: tuple[str, ...] = field(default=("memory", "disk", "torchrun"))
    """memory, disk: --elastic with checkpoints there. torchrun: its own restart, with checkpoints on the disk."""


def flags(folder: Path, interval: int, memory: bool) -> list[object]:
    found: list[object] = [*MODEL.split(), *TRAINING.split(), "--train-iters", NEVER]
    found += ["--save", folder / "saved", "--log-dir", folder / "log"]
    if not memory:
        return [*found, "--save-interval", interval]
    where = ["--memory-checkpoint-dir", folder / "memory"]
    return [*found, "--save-interval", NEVER, "--memory-checkpoint-interval", interval, *where]


# -- stress


def stress(options: Stress) -> None:
    names, draw = [chr(ord("a") + at) for at in range(options.nodes)], random.Random(options.seed)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as at:
        folder = Path(at)
        run = ElasticRun(folder, f"1:{options.nodes}", flags(folder, options.interval, not options.disk))
        with run:
            run.start(*names)
            run.trained(1)
            begin, kills = time.monotonic(), 0
            while time.monotonic() - begin < 60 * options.minutes:
                time.sleep(options.every * draw.uniform(0.5, 1.0))
                if len(run.running) > 1:
                    victim = draw.choice(sorted(run.running))
                    run.kill(victim)
                    shutil.rmtree(folder / "memory", ignore_errors=True) if not run.running else forget(folder, victim)
                    kills += 1
                time.sleep(options.every * draw.uniform(0.0, 0.5))
                for name in names:
                    if name not in run.running and draw.random() < 0.6:
                        run.start(name)
                gone = [name for name, node in run.running.items() if node.poll() is not None]
                assert not gone, f"{gone} ended:\n{run.everything()[-3000:]}"
                print(
                    f"{time.monotonic() - begin:4.0f} s: {len(run.running)} nodes, iteration {run.iteration}",
                    flush=True,
                )
            (folder / "log" / "stop").touch()
            codes = run.end()
            repeated, lost = check_repeats(run, 2 * options.interval)
            steps = check_curve(run, folder)
    print(f"{kills} kills, {len(repeated)} restarts, {steps} steps, exit codes {codes}")
    print(f"{sum(repeated)} steps were repeated, {max(repeated)} of them at most after a restart")
    print(f"{lost} restarts found neither copy of some part in memory, and loaded an older checkpoint")


def forget(folder: Path, node: str) -> None:
    """A machine that loses its power loses its memory."""
    for part in (folder / "memory").glob(f"*/{node}-*"):
        shutil.rmtree(part, ignore_errors=True)


def check_repeats(run: ElasticRun, most: int) -> tuple[list[int], int]:
    """Return the steps that each generation repeated of those before it, and how many had lost both copies.

    Those start from an older checkpoint, as they report; others repeat `most` steps at most.
    """
    reached: dict[int, tuple[int, int, bool]] = {}  # generation -> first and last iteration; both copies were lost
    for name in sorted(run.folder.glob("node-*.log")):
        lost, generation = False, 0
        for line in name.read_text().splitlines():
            lost |= "has lost both copies" in line
            if begun := re.match(r"generation (\d+): .* from iteration (\d+)", line):
                generation = int(begun[1])
                reached[generation], lost = (int(begun[2]), int(begun[2]), lost), False
            elif made := re.match(r"iteration +(\d+)/", line):
                began, last, both = reached[generation]
                reached[generation] = began, max(last, int(made[1])), both
    order = [reached[number] for number in sorted(reached)]
    found, last = [], order[0][1]
    for began, ended, both in order[1:]:
        found.append(max(0, last - began))
        assert both or found[-1] <= most, f"{found[-1]} steps were repeated"
        last = max(last, ended)
    return found, sum(both for _, _, both in order)


def check_curve(run: ElasticRun, folder: Path) -> int:
    """Return the number of steps, each of which was logged once."""
    found = run.metrics()
    steps = len(found)
    assert [record["iteration"] for record in found] == list(range(1, steps + 1)), "a step is missing or there twice"
    alone = [*MODEL.split(), *TRAINING.split(), "--train-iters", NEVER, "--exit-interval", steps]
    command = [sys.executable, ROOT / "pretrain_gpt.py", *alone, "--log-dir", folder / "alone", "--micro-batch-size", 2]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    other = ElasticRun(folder, "1:1", []).metrics(folder / "alone")
    for ours, wanted in zip(found, other, strict=True):
        assert ours["consumed_samples"] == wanted["consumed_samples"] == 12 * wanted["iteration"]
        difference = abs(ours["loss"] / wanted["loss"] - 1)
        assert difference < LIMIT, f"iteration {ours['iteration']}: losses differ by {difference:g}"
    return steps


# -- times


def times(options: Times) -> None:
    found: dict[str, list[float]] = {kind: [] for kind in options.kinds}
    for turn in range(options.rounds):
        for kind in options.kinds:
            with tempfile.TemporaryDirectory(dir="/dev/shm") as at:
                measure = plain_seconds if kind == "torchrun" else elastic_seconds
                found[kind].append(measure(Path(at), kind, options.interval))
            load = os.getloadavg()[0]
            print(f"round {turn}: {kind}: {found[kind][-1]:.1f} s to the next step (load {load:.1f})", file=sys.stderr)
    print("| restart | least s | median s | most s |\n|---|---|---|---|")
    for kind, seconds in found.items():
        print(f"| {kind} | {min(seconds):.1f} | {statistics.median(seconds):.1f} | {max(seconds):.1f} |")


def elastic_seconds(folder: Path, kind: str, interval: int) -> float:
    with ElasticRun(folder, "2:3", flags(folder, interval, kind == "memory")) as run:
        run.start("a", "b", "c")
        run.trained(3 * interval)
        begin = time.monotonic()
        run.kill("b")
        forget(folder, "b")
        run.until(lambda: resumed(run.everything()))
        return time.monotonic() - begin


def plain_seconds(folder: Path, kind: str, interval: int) -> float:
    """torchrun's agents with their defaults; a layout that fits two nodes and three."""
    run = PlainRun(
        folder, "2:3", [*flags(folder, interval, False), "--load", folder / "saved", "--micro-batch-size", 2]
    )
    with run:
        run.start("a", "b", "c")
        run.trained(3 * interval)
        begin = time.monotonic()
        run.kill("b")
        run.until(lambda: resumed(run.everything()))
        return time.monotonic() - begin


class PlainRun(ElasticRun):
    """The same nodes under torchrun's own agents. The first one hosts the store, so it must not be killed."""

    def _cold(self, env: dict[str, str], out: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", self.nodes, "--nproc-per-node", "1"]
        command += ["--max-restarts", "100", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{self.port}"]
        command += [str(ROOT / "pretrain_gpt.py"), *self.flags]
        with open(out, "ab") as file:
            started = subprocess.Popen(command, cwd=self.folder, env={**os.environ, **env}, stdout=file, stderr=file)
        if len(self.running) == 0:
            time.sleep(3)  # it takes the store's port
        return started


def resumed(said: str) -> bool:
    """Return whether a step was made after a resume."""
    return bool(re.search(r"iteration +\d+/", said.partition("resuming after iteration")[2]))


def main() -> None:
    options = tyro.cli(
        Annotated[Stress, tyro.conf.subcommand("stress")] | Annotated[Times, tyro.conf.subcommand("times")]  # type: ignore[arg-type]
    )
    stress(options) if isinstance(options, Stress) else times(options)


if __name__ == "__main__":
    main()
