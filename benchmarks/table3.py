#!/usr/bin/env python3
"""The ZeRO paper's Table 3, configurations C1 to C5: run at a small size, and at the paper's sizes by estimate.

Each small run is `pretrain_gpt.py --preset cN` on real ranks, a few iterations of this repository's own documents;
the table shows bytes measured on rank 0, asserted equal to `estimate`. The second table has the
largest model that the paper trained with each configuration (400 GPUs of 32 GB, tensor parallelism of 16, batch 16 a
replica) as rank 0 of the same engine would hold it, sequence 1024 and vocabulary 50257 assumed.

    python -m benchmarks.table3
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.reports.published import CONFIGURATIONS, FIGURE_6
from megazero.config.cli import parse
from megazero.model.stage import declare
from megazero.plan.layout.layers import num_parameters
from megazero.plan.layout.resolve import resolve
from megazero.price.bytes.estimate import estimate, stage_bytes

ROOT = Path(__file__).resolve().parent.parent
RANKS, ITERATIONS = 4, 3  # tensor parallelism of 2, data parallelism of 2
KINDS = ("parameters", "optimizer", "gradients", "activation_checkpoints", "buffers", "logits", "peak", "host")
WITHOUT = {2: 1, 4: 3, 5: 4}  # configuration -> the one that it adds to


def run(command: list[object]) -> None:
    done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}{done.stderr[-3000:]}")


def make_corpus(folder: Path) -> Path:
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    tool = ROOT / "data_tools" / "preprocess_data.py"
    run([sys.executable, tool, "--input", *documents, "--output-prefix", folder / "c", "--tokenizer", "byte"])
    return folder / "c_text_document"


def measure(flags: list[object], ranks: int, corpus: Path, log: Path) -> list[dict[str, int]]:
    """[memory, traffic] of rank 0 in the last iteration of a run, which must equal `estimate`."""
    flags = [*flags, "--data-path", corpus, "--tokenizer", "byte", "--train-iters", ITERATIONS, "--lr-warmup-iters", 1]
    run(["bash", ROOT / "scripts" / "launch.sh", "--nproc", ranks, *flags, "--log-dir", log])
    last = json.loads((log / "metrics.jsonl").read_text().splitlines()[-1])
    config, layout = resolve(parse([str(flag) for flag in flags]), ranks, 257, declare)
    assert [last["memory_bytes"], last["traffic_bytes"]] == list(estimate(config, layout)), flags
    return [last["memory_bytes"], last["traffic_bytes"]]


def small(console: Console) -> None:
    table = Table(title=f"measured on {RANKS} ranks, bytes of rank 0")
    for name in ("", *KINDS, "tp traffic", "dp traffic"):
        table.add_column(name, justify="right")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = make_corpus(folder)
        for number, what in CONFIGURATIONS.items():
            memory, traffic = measure(["--preset", f"c{number}"], RANKS, corpus, folder / f"c{number}")
            cells = [memory[kind] for kind in KINDS] + [traffic["tp"], traffic["dp"]]
            table.add_row(f"C{number} {what}", *(f"{cell:,}" for cell in cells))
    console.print(table)


def large(console: Console) -> None:
    table = Table(title="by estimate, the paper's largest models: GB of a rank of 400, of 32")
    kinds = ("states", "activation_checkpoints", "logits", "a block", "in all, at most", "host")
    for name in ("", "model", *kinds):
        table.add_column(name, justify="right")
    for model in CONFIGURATIONS:
        for number in [model, *([WITHOUT[model]] if model in WITHOUT else [])]:
            run = FIGURE_6[model]
            shape = ["--num-layers", run.layers, "--hidden-size", run.hidden, "--num-attention-heads", run.heads]
            shape += ["--seq-length", 1024, "--vocab-size", 50257, "--tensor-model-parallel-size", 16]
            shape += [
                "--micro-batch-size",
                16,
                "--global-batch-size",
                400,
                "--precision",
                "fp16",
                "--grad-dtype",
                "fp16",
            ]
            shape += ["--reduce-bucket-size", 40_000_000]
            config, layout = resolve(parse(["--preset", f"c{number}", *map(str, shape)]), 400, 0, declare)
            memory = estimate(config, layout, needs_staging_buffer=False).memory
            block = stage_bytes(config, layout, 0, "cuda").activations
            states = sum(memory[kind] for kind in ("parameters", "optimizer", "gradients"))
            parts = [memory[kind] for kind in ("activation_checkpoints", "logits")]
            cells = [states, *parts, block, memory["peak"] + block, memory["host"]]
            size = f"{num_parameters(declare(config.model)) / 1e9:.0f}B"
            table.add_row(f"C{number} {CONFIGURATIONS[number]}", size, *(f"{cell / 1e9:.2f}" for cell in cells))
        table.add_section()
    console.print(table)


if __name__ == "__main__":
    console = Console(width=None if sys.stdout.isatty() else 200)
    small(console)
    large(console)
