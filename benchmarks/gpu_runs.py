#!/usr/bin/env python3
"""Runs of pretrain_gpt.py on one device: seconds of a step and bytes at its peak next to the plan's. And, if asked:
the same run twice in deterministic mode, bit for bit; a run that saves half way, and one that resumes there.

The runs are in this process, one after the other. Prints a Markdown table, and a line for each comparison; the exit
code is 1 if a run fails or a comparison finds a difference. Without a GPU the models are cut to a tiny size, only to
test the code. Example:

    python -m benchmarks.gpu_runs --runs "llama-1b --global-batch-size 8" "gpt2-124m --precision fp16"
"""

import contextlib
import gc
import json
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

import pretrain_gpt
from megazero.flags.cli import read
from megazero.planner.run_plan import make_plan, plan_config
from megazero.planner.time.devices import find_card

COLUMNS = ("run", "ms per step", "planned ms", "GB at the peak", "planned GB", "loss")
WARM = 4  # iterations that do not count
USUAL = "--mock-data --lr-warmup-iters 0 --log-interval 4"
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --seq-length 8 --vocab-size 61 "
    "--micro-batch-size 1 --global-batch-size 2 --fused-kernels eager"
)


@dataclass(frozen=True)
class Options:
    """Runs of pretrain_gpt.py on one device, next to their plans."""

    runs: tuple[str, ...]
    """Preset and further flags of each run, in quotes. Data are mock."""
    iterations: int = 16
    """Iterations of a run; the first four are not timed."""
    compare: Literal["none", "twice", "resume"] = "none"
    """twice: the same run again. resume: again from a save half way. Both in deterministic mode, bit for bit."""
    tiny: bool = False
    """Cut the models to a tiny size, as without a GPU."""


class Trained(NamedTuple):
    """Records of metrics.jsonl by iteration, and seconds outside steps."""

    records: dict[int, dict[str, Any]]

    def values(self) -> dict[int, tuple[float, float]]:
        return {number: (record["loss"], record["grad_norm"]) for number, record in self.records.items()}

    @property
    def saving(self) -> float:
        return max((record.get("pause_seconds", {}).get("save", 0.0) for record in self.records.values()), default=0.0)


def trained(words: Sequence[str], log_dir: Path) -> Trained:
    """Train with these flags, and read the metrics. The run prints to stderr."""
    with contextlib.redirect_stdout(sys.stderr):
        pretrain_gpt.main([*words, "--log-dir", str(log_dir)])
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    lines = (log_dir / "metrics.jsonl").read_text().splitlines()
    return Trained({record["iteration"]: record for record in map(json.loads, lines)})


def planned(words: Sequence[str]) -> tuple[str, str]:
    """Return the planned ms of a step and GB at its peak; empty on an unknown card."""
    card = find_card(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else None
    if torch.cuda.is_available() and card is None:
        return "", ""
    asked = [*words, "--plan", "--world-size", "1", "--device-type", card.name if card else "cpu"]
    plan = make_plan(*plan_config(read(asked).config))
    return f"{plan.seconds * 1e3:.1f}", f"{plan.stages[0].peak / 1e9:.3f}"


def compared(words: Sequence[str], o: Options, first: Trained, folder: Path) -> str:
    """Return the first difference from a second run, or from one that resumes half way; empty if there is none."""
    half = o.iterations // 2
    resumes = ["--load", str(folder / "saved" / f"iter_{half:07d}")] if o.compare == "resume" else []
    again, wanted = trained([*words, *resumes], folder / "again").values(), first.values()
    expected = {number: value for number, value in wanted.items() if not resumes or number > half}
    if again.keys() != expected.keys():
        return f"iterations {sorted(again)} instead of {sorted(expected)}"
    for number, value in expected.items():
        if again[number] != value:
            return f"iteration {number}: loss and norm {again[number]} instead of {value}"
    return ""


def run(flags: str, o: Options, folder: Path) -> bool:
    """Print the row of a run, and the line of its comparison; return whether all is right."""
    words = ["--preset", *shlex.split(flags), *USUAL.split(), "--train-iters", str(o.iterations)]
    words += TINY.split() if o.tiny or not torch.cuda.is_available() else []
    words += ["--deterministic-mode"] if o.compare != "none" else []
    saves = ["--save", str(folder / "saved"), "--save-interval", str(o.iterations // 2)]
    first = trained([*words, *(saves if o.compare == "resume" else [])], folder / "first")
    steps = [record["step_seconds"] for number, record in first.records.items() if number > WARM]
    planned_ms, planned_gb = planned(words)
    peak = max(record["memory_bytes"]["peak"] for record in first.records.values())
    cells = [flags, f"{1e3 * statistics.median(steps):.1f}", planned_ms, f"{peak / 1e9:.3f}", planned_gb]
    print(f"| {' | '.join(cells)} | {first.records[o.iterations]['loss']:.4f} |", flush=True)
    if o.compare == "none":
        return True
    difference = compared(words, o, first, folder)
    saving = f"; a save takes {first.saving:.2f} s" if o.compare == "resume" else ""
    print(f"\n{o.compare}: {difference or 'the same bits'}{saving}\n", flush=True)
    return not difference


def main(o: Options) -> int:
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    right = []
    for flags in o.runs:
        with tempfile.TemporaryDirectory() as folder:
            try:
                right.append(run(flags, o, Path(folder)))
            except (Exception, SystemExit) as error:  # out of memory, a refusal: the other runs are worth a row
                first = (str(error).splitlines() or [type(error).__name__])[0][:160]
                print(f"| {flags} | failed: {first} {'| ' * (len(COLUMNS) - 2)}|", flush=True)
                right.append(False)
    return 0 if all(right) else 1


if __name__ == "__main__":
    import tyro

    sys.exit(main(tyro.cli(Options)))
