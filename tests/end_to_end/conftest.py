"""A small real corpus, made by the real tool."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from tests.end_to_end.cli import ROOT, run


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a .bin/.idx pair: the repository's own documents, and shuffled ones, as bytes."""
    folder = tmp_path_factory.mktemp("corpus")
    words = (ROOT / "LICENSE").read_text().split()
    draw = random.Random(0)
    files = []
    for i in range(40):
        files.append(folder / f"{i:02}.txt")
        files[-1].write_text(" ".join(draw.choices(words, k=draw.randrange(40, 400))))
    done = run(
        *(sys.executable, "data_tools/preprocess_data.py", "--input", *files, "--output-prefix", folder / "small"),
        *("--tokenizer", "byte", "--append-eod", "--workers", "2"),
    )
    assert done.returncode == 0, done.stderr
    return folder / "small_text_document"


@pytest.fixture(scope="session")
def model(corpus: Path) -> list[object]:
    """Flags of a small odd model on the corpus: 5 layers, 6 heads, a prime vocabulary (257)."""
    sizes = "--num-layers 5 --hidden-size 48 --num-attention-heads 6 --seq-length 33 --init-method-std 0.05"
    training = (
        "--global-batch-size 12 --micro-batch-size 2 --lr 1e-3 --tokenizer byte --log-interval 5 --poison-buffers"
    )
    return [*sizes.split(), *training.split(), "--data-path", corpus]
