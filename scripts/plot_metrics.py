#!/usr/bin/env python3
"""Draw the loss curves of runs, from their metrics.jsonl.

Example: python scripts/plot_metrics.py runs/a runs/b --output loss.png
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class Options:
    """Draw the loss curves of runs, from their metrics.jsonl."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """The --log-dir folders."""
    output: Path = Path("loss.png")
    """PNG file to write."""


def read_metrics(run: Path) -> list[dict]:
    """The iterations of a run. A line that is cut off, as the last of a live or killed run may be, is left out."""
    path = run / "metrics.jsonl" if run.is_dir() else run
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give the --log-dir folder of a run")
    found, cut = [], []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and "iteration" in record and "loss" in record:
            found.append(record)
        elif isinstance(record, dict) and "eval_split" in record:  # of a checkpoint, by --eval-only
            continue
        else:
            cut.append(str(number))
    if not found:
        raise ValueError(f"{path} has no iteration yet")
    if cut:
        print(f"{path}: left out what is no whole iteration: line {', '.join(cut)}", file=sys.stderr)
    return found


def plot(runs: list[Path], output: Path) -> None:
    """Training loss as a line, validation loss as points, a colour a run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    for number, run in enumerate(runs):
        found, color = [m for m in read_metrics(run) if m["loss"] is not None], f"C{number}"
        axes.plot(
            [m["iteration"] for m in found],
            [m["loss"] for m in found],
            color=color,
            alpha=0.5,
            label=f"{run.name}: training",
        )
        judged = [m for m in found if m.get("validation_loss") is not None]
        if judged:
            iterations, losses = [m["iteration"] for m in judged], [m["validation_loss"] for m in judged]
            label = f"{run.name}: validation, {losses[-1]:.3f} at the end"
            axes.plot(iterations, losses, "o-", color=color, label=label)
    axes.set(xlabel="iteration", ylabel="cross-entropy, nats a token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=120)


def main(options: Options) -> None:
    if not options.runs:
        raise ValueError("no run is named; give the --log-dir folder of one or more")
    plot(list(options.runs), options.output)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    try:
        main(tyro.cli(Options))
    except ValueError as error:
        sys.exit(f"ValueError: {error}")
