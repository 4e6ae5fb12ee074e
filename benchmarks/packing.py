"""Best-fit packing next to a stream that is cut: documents cut, padding, and the time to pack.

Example: python benchmarks/packing.py runs/preprocess
(the folder for packages and corpora, which are made if they are missing)
"""

import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.reports.blocks import markdown
from benchmarks.reports.dealing import NAMES, prepared
from megazero.data.epochs import permutation
from megazero.data.indexed import Int64s
from megazero.data.packing import pack_documents

ROOT = Path(__file__).resolve().parents[1]
CORPORA, LENGTHS = ("dictionary", "Linux", "Python"), (2048, 8192)
PAIR, SEEDS = "dictionary", (1, 2, 3)  # the corpus and the seeds of `losses`
MODEL = "--architecture llama --num-layers 3 --hidden-size 96 --num-attention-heads 3 --seq-length 256"
TRAINING = "--train-iters 120 --global-batch-size 16 --micro-batch-size 16 --lr 3e-3 --lr-warmup-iters 12"


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
            found = pack_documents(lengths, s + 1, np.random.PCG64(1).random_raw).filling
            without = (lengths - 1 - s).clip(0).sum() / (lengths - 1).sum()
            row = [NAMES[name], f"{s:,}", f"{lengths.size:,}", *cuts(lengths[permutation(stream, lengths.size)], s)]
            rows.append([*row, f"{without:.2%}", f"{found.padding:.2%}"])
    columns = ["corpus", "s", "documents", "split: cut though they fit", "split: targets without their beginning"]
    columns += ["best-fit: targets without their beginning", "best-fit: padding"]
    print(markdown(columns, rows))


def times() -> None:
    """Print the time and the memory of packing made-up lengths, lognormal with a mean of 830 tokens."""
    rows = []
    for count in (10**6, 10**7, 10**8):
        draw = np.random.default_rng(0)
        lengths = np.concatenate([draw.lognormal(6, 1.2, 10**6).clip(1, 10**6).astype(np.int32)] * (count // 10**6))
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        found = pack_documents(lengths, 2049, np.random.PCG64(1).random_raw).filling
        seconds, after = time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        rows.append([f"{count:,}", f"{seconds:.1f}", f"{(after - before) >> 10:,}", f"{found.padding:.3%}"])
    print(markdown(["documents", "CPU seconds", "MB besides the lengths", "padding"], rows))


def run(*words: object) -> None:
    subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def losses(folder: Path) -> None:
    """Print validation losses on whole documents, after training on as many tokens of either packing."""
    prepared(PAIR, folder)  # its jsonl
    tokenizer, text, corpus = folder / "small.json", folder / f"{PAIR}.jsonl", folder / "small"
    if not tokenizer.exists():
        run("data_tools/train_tokenizer.py", "--input", text, "--vocab-size", 2048, "--output", tokenizer)
    prefix = f"{corpus}_text_document"
    if not Path(f"{prefix}.idx").exists():
        words = ["--input", text, "--output-prefix", corpus, "--tokenizer", tokenizer, "--append-eod"]
        run("data_tools/preprocess_data.py", *words)
    rows = []
    for packing in ("split", "best-fit"):
        found = []
        for seed in SEEDS:
            save = folder / "losses" / f"{packing}-{seed}"
            common = ["--data-path", prefix, "--split", "98,2", *MODEL.split()]
            if not list(save.glob("iter_*")):
                run("pretrain_gpt.py", *common, *TRAINING.split(), "--packing", packing, "--seed", seed, "--save", save)
            log = folder / "losses" / f"{packing}-{seed}-log"
            whole = ["--packing", "best-fit", "--eval-only", "--eval-iters", 0, "--load", save, "--log-dir", log]
            run("pretrain_gpt.py", *common, *whole)
            found.append(json.loads((log / "metrics.jsonl").read_text().splitlines()[-1])["validation_loss"])
        rows.append([packing, *(f"{loss:.4f}" for loss in found), f"{statistics.mean(found):.4f}"])
    print(markdown(["--packing", *(f"seed {seed}" for seed in SEEDS), "mean"], rows))


if __name__ == "__main__":
    tables(Path(sys.argv[1]))
    times()
    losses(Path(sys.argv[1]))
