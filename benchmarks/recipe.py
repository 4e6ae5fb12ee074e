#!/usr/bin/env python3
"""Losses of small models around the learning rate of --recipe auto, on the plays of the quickstart.

The loss is the mean over the last tenth of the iterations. If the tokens are fewer than the corpus has (1.8 million of
the 90 % that are trained on), each is seen once, so it is a loss on unseen text.

`bash scripts/quickstart.sh` makes the corpus before. One process of one thread per run. Example:

    python -m benchmarks.recipe --layers 2 --hidden 64 --tokens 300000
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Options:
    """Train a model with multiples of the recipe's learning rate. Prints a row of a table as each run ends."""

    layers: int
    hidden: int
    tokens: int = 0
    """Tokens of training. 0: those of the recipe."""
    multiples: tuple[float, ...] = (0.5, 0.25, 0.125, 0.0625, 0.03125)
    """Learning rates of the runs behind the first, as multiples of the recipe's."""
    flags: str = "--architecture llama"
    """Further flags of the runs."""
    data: Path = ROOT / "runs" / "quickstart" / "shakespeare_text_document"
    """The corpus."""


def train(options: Options, *more: object) -> tuple[float, float, float]:
    """Return the learning rate, the weight decay and the loss at the end of a run."""
    flags = f"--num-layers {options.layers} --hidden-size {options.hidden} --seq-length 128 --micro-batch-size 8"
    flags += f" --num-attention-heads {options.hidden // 32} --recipe auto --log-interval 1000 {options.flags}"
    flags += " --split 90,10,0"
    words = [*flags.split(), *map(str, more), "--data-path", str(options.data)]
    words += ["--train-tokens", str(options.tokens)] if options.tokens else []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *words, "--log-dir", folder]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        given = tomllib.loads((Path(folder) / "config.toml").read_text())
        losses = [json.loads(line)["loss"] for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return given["lr"], given["weight-decay"], statistics.mean(losses[-(len(losses) // 10) :])


def main(options: Options) -> None:
    """Print the table."""
    print("| learning rate | of the recipe's | weight decay | loss |\n|---|---|---|---|")
    rate = 0.0
    for multiple in (1, *options.multiples):
        lr, decay, loss = train(options, *(["--lr", f"{multiple * rate:.3g}"] if rate else []))
        rate = rate or lr
        print(f"| {lr:.3g} | {multiple:g} | {decay:.3g} | {loss:.3f} |", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options))
