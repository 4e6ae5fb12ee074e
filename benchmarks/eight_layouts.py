#!/usr/bin/env python3
"""Train one model in eight layouts and draw the loss curves: docs/pictures/eight-layouts.png.

The corpus is the quickstart's; a run that is already whole is not trained again. Example:

    bash scripts/quickstart.sh && python -m benchmarks.eight_layouts
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[1]
RUNS = Path("runs/eight-layouts")
QUICKSTART = Path("runs/quickstart")

# name -> (ranks, flags)
LAYOUTS = {
    "1 process": (1, "--zero-stage 0"),
    "dp 4, ZeRO 1": (4, "--zero-stage 1"),
    "dp 4, ZeRO 2": (4, "--zero-stage 2"),
    "dp 4, ZeRO 3, recompute": (4, "--zero-stage 3 --recompute full"),
    "tp 4, sequence parallel": (4, "--tensor-model-parallel-size 4 --sequence-parallel"),
    "pp 4, 1f1b": (4, "--pipeline-model-parallel-size 4"),
    "pp 2, zero-bubble, dp 2, ZeRO 2": (
        4,
        "--pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble --zero-stage 2",
    ),
    "pp 2, dp 2, tp 2, ZeRO 3, Pa": (
        8,
        "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --zero-stage 3 --recompute full "
        "--partition-activations",
    ),
}


@dataclass(frozen=True)
class Options:
    """Train the preset tiny in eight layouts, one after the other, and draw their loss curves."""

    train_iters: int = 200
    """Iterations of each run, of 2,048 tokens."""
    output: Path = Path("docs/pictures/eight-layouts.png")
    """Picture to write."""


def is_whole(folder: Path, iterations: int) -> bool:
    """Return whether the metrics of a run end with its last iteration."""
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return bool(lines) and json.loads(lines[-1])["iteration"] == iterations


def main(options: Options) -> None:
    os.chdir(ROOT)
    corpus = QUICKSTART / "shakespeare_text_document"
    if not corpus.with_suffix(".bin").exists():
        sys.exit(f"{corpus}.bin does not exist; run `bash scripts/quickstart.sh` first")
    for name, (ranks, flags) in LAYOUTS.items():
        folder = RUNS / name
        if is_whole(folder, options.train_iters):
            continue
        print(f"{name}: {ranks} ranks, {flags}", flush=True)
        model = "--preset tiny --seq-length 128 --global-batch-size 16 --micro-batch-size 2"
        model += f" --lr-warmup-iters {options.train_iters // 10} --train-iters {options.train_iters}"
        data = f"--data-path {corpus} --tokenizer {QUICKSTART / 'tokenizer'}"
        command = ["bash", "scripts/launch.sh", "--nproc", str(ranks), *model.split(), *data.split(), *flags.split()]
        subprocess.run([*command, "--log-dir", str(folder), "--log-interval", "50"], check=True)
    folders = [str(RUNS / name) for name in LAYOUTS]
    subprocess.run(
        [sys.executable, "scripts/plot_metrics.py", *folders, "--smooth", "1", "--output", str(options.output)],
        check=True,
    )


if __name__ == "__main__":
    main(tyro.cli(Options))
