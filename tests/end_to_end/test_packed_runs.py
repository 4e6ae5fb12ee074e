"""--packing best-fit as a user runs it: announced, resumed to the bit within an epoch, evaluated on every target."""

import json
from pathlib import Path

import pytest

from tests.end_to_end.cli import metrics, pretrain
from tests.unit.data_helpers import numbered_documents, write_corpus

pytestmark = pytest.mark.second

FLAGS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 12 --vocab-size 300 --global-batch-size 6 "
    "--micro-batch-size 2 --train-iters 6 --lr 0.01 --split 70,30,0 --packing best-fit --log-interval 1"
)


def test_a_resume_within_an_epoch_and_an_evaluation_of_all(tmp_path: Path) -> None:
    documents = [[token % 300 for token in document] for document in numbered_documents(40, high=25)]
    data = ["--data-path", write_corpus(tmp_path / "c", documents)]  # without end-of-document tokens and PREFIX.json
    alone = pretrain(*FLAGS.split(), *data, "--log-dir", tmp_path / "alone")
    assert alone.returncode == 0, alone.stderr
    assert "--packing best-fit: 29 samples per epoch, 1.33% padding; 16 documents longer than a sample" in alone.stdout
    assert "attention stays within documents, and positions restart in each" in alone.stdout
    for stop in (2, 6):  # an epoch ends within iteration 5
        folders = ["--save", tmp_path / "run", "--load", tmp_path / "run", "--log-dir", tmp_path / "run"]
        done = pretrain(*FLAGS.split(), *data, *folders, "--exit-interval", stop)
        assert done.returncode == 0, done.stderr
    curves = [[(m["loss"], m["grad_norm"]) for m in metrics(tmp_path / name)] for name in ("alone", "run")]
    assert curves[0] == curves[1] and len(curves[0]) == 6
    only = ["--eval-only", "--eval-iters", 0, "--load", tmp_path / "run", "--log-dir", tmp_path / "evaluated"]
    done = pretrain(*FLAGS.split(), *data, *only)
    assert done.returncode == 0, done.stderr
    (record,) = map(json.loads, (tmp_path / "evaluated" / "metrics.jsonl").read_text().splitlines())
    assert record["targets"] == sum(max(0, len(document) - 1) for document in documents[28:])
    refused = pretrain(*FLAGS.split(), "--mock-data")
    assert refused.returncode == 1 and "--packing best-fit with --mock-data: made-up tokens" in refused.stderr
