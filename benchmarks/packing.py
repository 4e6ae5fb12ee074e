"""Best-fit packing next to a stream that is cut: documents cut, padding, time, and the loss of whole documents.

Example: python benchmarks/packing.py runs/preprocess
(the folder for packages and corpora, which are made if they are missing; --train also trains small models)
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.corpus import dictionary
from benchmarks.reports.blocks import markdown
from benchmarks.reports.dealing import NAMES, prepared
from megazero.data.epochs import permutation
from megazero.data.indexed import Int64s
from megazero.data.packing import pack

ROOT = Path(__file__).resolve().parents[1]
CORPORA, LENGTHS = ("dictionary", "Linux", "Python"), (2048, 8192)
SEEDS, ITERATIONS = (1, 2, 3), 200
WAYS = {
    "split": "",
    "split, attention within documents": "--reset-attention-mask --reset-position-ids",
    "best-fit": "--packing best-fit",
}
BY_DOCUMENT = ("--packing", "best-fit")  # each target of the validation split, in the context of its own document
MODEL = (
    "--preset tiny --num-layers 2 --hidden-size 128 --tokenizer byte --seq-length 512 --global-batch-size 8 "
    "--micro-batch-size 8 --lr 3e-3"
)


def cuts(lengths: Int64s, s: int) -> list[str]:
    """Return cut documents of at most s + 1 tokens, and the share of targets without their document's beginning."""
    begins = np.cumsum(lengths) - lengths
    lost = (begins + lengths - 1 - (begins // s + 1) * s).clip(0)  # targets behind the first cut in each document
    short = lengths <= s + 1
    return [f"{(lost[short] > 0).sum() / lengths.size:.1%}", f"{lost.sum() / (lengths - 1).sum():.2%}"]


def tables(folder: Path) -> None:
    """Print the cuts and the padding of real corpora."""
    rows = []
    for name in CORPORA:
        data = prepared(name, folder)
        lengths = data.document_lengths(0, data.num_documents).astype(np.int64)
        for s in LENGTHS:
            stream = np.random.PCG64(1).random_raw
            found = pack(lengths, s + 1, np.random.PCG64(1).random_raw).filling
            without = (lengths - 1 - s).clip(0).sum() / (lengths - 1).sum()
            rows.append([
                NAMES[name], f"{s:,}", f"{lengths.size:,}", *cuts(lengths[permutation(stream, lengths.size)], s),
                "0.0%", f"{without:.2%}", f"{found.padding:.2%}",
            ])  # fmt: skip
    columns = ["corpus", "s", "documents", "split: cut though they fit", "split: targets without their beginning"]
    columns += ["best-fit: cut though they fit", "best-fit: targets without their beginning", "best-fit: padding"]
    print(markdown(columns, rows))


def times() -> None:
    """Print the time and the memory of packing made-up lengths, lognormal with a mean of 830 tokens."""
    rows = []
    for count in (10**6, 10**7, 10**8):
        draw = np.random.default_rng(0)
        lengths = np.concatenate([draw.lognormal(6, 1.2, 10**6).clip(1, 10**6).astype(np.int32)] * (count // 10**6))
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        found = pack(lengths, 2049, np.random.PCG64(1).random_raw).filling
        seconds, after = time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        rows.append([f"{count:,}", f"{seconds:.1f}", f"{(after - before) >> 10:,}", f"{found.padding:.3%}"])
    print(markdown(["documents", "CPU seconds", "MB besides the lengths", "padding"], rows))


def train(folder: Path) -> None:
    """Print validation losses of whole documents, for each way and seed, after equally many samples."""
    text = folder / "entries.jsonl"
    text.write_text("".join(json.dumps({"text": t}) + "\n" for t in dictionary(folder / "packages")), encoding="utf-8")
    tool = [sys.executable, ROOT / "data_tools/preprocess_data.py", "--tokenizer", "byte", "--append-eod"]
    run([*tool, "--input", text, "--output-prefix", folder / "bytes"])
    model = [sys.executable, ROOT / "pretrain_gpt.py", *MODEL.split(), "--data-path", folder / "bytes_text_document"]
    model += ["--split", "999,1,0"]
    rows = []
    for way, flags in WAYS.items():
        losses = []
        for seed in SEEDS:
            at = folder / f"{'_'.join(way.split())}-{seed}"
            own = [*flags.split(), "--seed", seed, "--train-iters", ITERATIONS, "--save", at]
            run([*model, *own])
            run([*model, *BY_DOCUMENT, "--eval-only", "--eval-iters", 0, "--load", at, "--log-dir", at / "log"])
            record = json.loads((at / "log" / "metrics.jsonl").read_text().splitlines()[-1])
            losses.append(record["validation_loss"])
            print(way, seed, record["validation_loss"], record["targets"], file=sys.stderr, flush=True)
        shown = ", ".join(f"{each:.4f}" for each in losses)
        rows.append([way, f"{statistics.mean(losses):.4f}", shown])
    print(markdown(["training", "mean", "seeds 1, 2, 3"], rows))


def run(command: list[object]) -> None:
    done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}{done.stderr[-3000:]}")


if __name__ == "__main__":
    place = Path(sys.argv[1])
    tables(place)
    times()
    if "--train" in sys.argv:
        train(place)
