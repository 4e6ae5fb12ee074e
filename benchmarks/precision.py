#!/usr/bin/env python3
"""Distance of 16-bit training from fp32: the same tiny model on the same text in fp32, bf16 and fp16, stages 0 to 3.

Runs pretrain_gpt.py with two ranks for each, prints Markdown. Needs a corpus, such as the quickstart's:

    python -m benchmarks.precision --data-path runs/quickstart/shakespeare_text_document \\
        --tokenizer runs/quickstart/tokenizer
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Options:
    """Distance of 16-bit training from fp32."""

    data_path: str
    """Prefix of a .bin/.idx pair."""
    tokenizer: str
    """The tokenizer of the data."""
    iterations: int = 200
    """Iterations of each run."""
    stages: tuple[int, ...] = (0, 1, 2, 3)
    """ZeRO stages."""


def losses(o: Options, precision: str, stage: int) -> list[float]:
    sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2"
    flags = (
        f"{sizes} --global-batch-size 8 --lr 1e-3 --lr-warmup-iters 20 --log-interval 1000 --train-iters {o.iterations}"
    )
    gradients = "fp32" if precision == "fp32" else precision
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *("bash", "scripts/launch.sh", "--nproc", "2", *flags.split(), "--log-dir", folder),
            *("--precision", precision, "--grad-dtype", gradients, "--zero-stage", str(stage)),
            *("--data-path", o.data_path, "--tokenizer", o.tokenizer),
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr[-3000:])
        return [json.loads(line)["loss"] for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def main(o: Options) -> None:
    wanted = losses(o, "fp32", 0)
    print(f"fp32, stage 0: loss {wanted[0]:.4f} -> {wanted[-1]:.4f} in {o.iterations} iterations\n")
    print("| precision, gradients | stage | last loss | largest gap to fp32 | largest gap to stage 0 |")
    print("|---|---|---|---|---|")
    for precision in ("fp32", "bf16", "fp16"):
        first = None
        for stage in o.stages:
            found = losses(o, precision, stage)
            first = first or found
            gap = max(abs(a - b) / b for a, b in zip(found, wanted, strict=True))
            own = max(abs(a - b) / b for a, b in zip(found, first, strict=True))
            print(f"| {precision} | {stage} | {found[-1]:.4f} | {gap:.1e} | {own:.1e} |", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options))
