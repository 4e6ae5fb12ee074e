"""Make the table of docs/results/end_of_run.md: stable, merged, averaged and really decayed, on the quickstart's plays.

A run of the quickstart's model with a constant learning rate trains to iteration END, with a running average. In the
span before END, its checkpoints are merged, and a branch decays from the first of them to 0; all have seen the same
samples.

Example: python -m benchmarks.reports.end_of_run runs/end
(the folder for runs; finished runs are not repeated)
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.reports.blocks import markdown, write_blocks
from scripts import quickstart

PAGE = quickstart.ROOT / "docs" / "results" / "end_of_run.md"
SEEDS = (1, 2, 3)
END, SPAN, EVERY = 400, 100, 10  # iterations
BATCH = 8
FLAGS = f"--preset quickstart --global-batch-size {BATCH} --eval-interval 0 --min-lr 0"
AVERAGED = f"--ema-interval {EVERY} --ema-decay 0.9"  # of about SPAN iterations
EVALUATED = f"--eval-only --eval-iters 50 --global-batch-size {BATCH}"
MERGES = {
    "the last 3, equal weights": ("mean", EVERY, 2 * EVERY),
    "all 11, equal weights": ("mean", EVERY, SPAN),
    "all 11, weights of a linear decay": ("decay", EVERY, SPAN),
    "3 of them, weights of a linear decay": ("decay", SPAN // 2, SPAN),
}


def run(*words: object) -> None:
    subprocess.run([sys.executable, *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def checkpoint(folder: Path, iteration: int) -> Path:
    return folder / f"iter_{iteration:07d}"


def pretrain(*words: object) -> None:
    data = ["--data-path", f"{quickstart.DATA}_text_document", "--tokenizer", quickstart.TOKENIZER]
    run("pretrain_gpt.py", *data, *words)


def train(seed: int, save: Path, last: int, *words: object) -> None:
    if not checkpoint(save, last).exists():
        flags = f"{FLAGS} --seed {seed} --save-interval {EVERY} --keep-last 0".split()
        pretrain(*flags, "--save", save, "--log-dir", save, *words)


def validation_loss(load: Path, log: Path) -> float:
    """Return the loss over the first batches of the validation split, the same for all."""
    if not (log / "metrics.jsonl").exists():
        pretrain(*f"--preset quickstart {EVALUATED}".split(), "--load", load, "--log-dir", log)
    return float(json.loads((log / "metrics.jsonl").read_text().splitlines()[-1])["validation_loss"])


def losses(seed: int, folder: Path) -> dict[str, float]:
    """Train, merge and decay with one seed; returns the loss of each."""
    stable, decayed = folder / "stable", folder / "decayed"
    train(seed, stable, END, "--lr-decay-style", "constant", "--train-iters", END, *AVERAGED.split())
    branch = ["--decay-from", checkpoint(stable, END - SPAN), "--decay-iters", SPAN, "--lr-wsd-decay-style", "linear"]
    train(seed, decayed, END, *branch)
    found = {
        f"iteration {at}, constant learning rate": validation_loss(checkpoint(stable, at), folder / f"at-{at}")
        for at in (END - SPAN, END)
    }
    for number, (name, (weights, every, span)) in enumerate(MERGES.items()):
        merged = folder / f"merged-{number}"
        if not merged.exists():
            paths = [checkpoint(stable, at) for at in range(END - span, END + 1, every)]
            run("scripts/checkpoint.py", "merge", "--weights", weights, merged, *paths)
        found[f"merged: {name}"] = validation_loss(merged, folder / f"of-merged-{number}")
    averaged = folder / "averaged"
    if not averaged.exists():
        export = ["export", "--weights", "ema", "--output", averaged]
        run("scripts/checkpoint.py", *export, checkpoint(stable, END))
    found["running average of every 10th iteration, decay 0.9"] = validation_loss(averaged, folder / "of-averaged")
    found[f"decayed to 0 over {SPAN} iterations"] = validation_loss(checkpoint(decayed, END), folder / "of-decayed")
    return found


def table(by_seed: list[dict[str, float]]) -> str:
    stable = f"iteration {END}, constant learning rate"
    rows = []
    for name in by_seed[0]:
        values = [found[name] for found in by_seed]
        gains = [found[stable] - found[name] for found in by_seed]
        shown = f"{statistics.mean(gains):.3f} ({min(gains):.3f} to {max(gains):.3f})" if name != stable else ""
        rows.append([name, *(f"{value:.4f}" for value in values), shown])
    return markdown(["weights", *(f"seed {seed}" for seed in SEEDS), f"below iteration {END}: mean (range)"], rows)


if __name__ == "__main__":
    quickstart.prepare()
    found = table([losses(seed, Path(sys.argv[1]) / f"seed-{seed}") for seed in SEEDS])
    print(found)
    write_blocks(PAGE, {"losses": found})
