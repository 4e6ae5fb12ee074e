"""pretrain_gpt.py --eval-only: loss and perplexity of a split, with the weights of a checkpoint that a run wrote."""

import math
import random
from pathlib import Path

import pytest
import torch

from megazero.flags.config import ModelConfig
from tests.end_to_end.cli import metrics, pretrain
from tests.end_to_end.test_generate import to_transformers
from tests.helpers.programs import warm
from tests.helpers.rings import by_default
from tests.helpers.rounding import model_tolerance
from tests.reference_run import read_checkpoint, write_corpus

LAYERS, HIDDEN, HEADS, LENGTH, WORDS = 2, 30, 3, 11, 61
SIZES = ["--num-layers", LAYERS, "--hidden-size", HIDDEN, "--num-attention-heads", HEADS, "--seq-length", LENGTH]
SIZES += ["--vocab-size", WORDS, "--init-method-std", 0.3, "--untie-embeddings", "--global-batch-size", 4]
NEAR = model_tolerance(ModelConfig(LAYERS, HIDDEN, 0, HEADS, LENGTH, WORDS), torch.float32)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """(folder of corpus, checkpoints and metrics, documents). Of ten documents one is validation, the last is test."""
    folder = tmp_path_factory.mktemp("evaluation")
    draw = random.Random(0)
    documents = [draw.choices(range(WORDS), k=47) for _ in range(10)]
    write_corpus(folder / "words", "<u2", [[document] for document in documents])
    training = ["--train-iters", 2, "--lr", 1e-2, "--eval-interval", 1, "--eval-iters", 3, "--split", "8,1,1"]
    saving = ["--save", folder / "run", "--log-dir", folder / "run"]
    done = pretrain(*SIZES, *training, *saving, "--data-path", folder / "words")
    assert done.returncode == 0, done.stderr
    return folder, documents


def evaluate(folder: Path, *flags: object, ranks: int = 1) -> tuple[str, dict]:
    """(the output, the line of metrics.jsonl)"""
    log_dir = folder / "evaluations" / str(random.random())
    common = [*SIZES, "--data-path", folder / "words", "--split", "8,1,1", "--load", folder / "run", "--eval-only"]
    done = pretrain(*common, "--log-dir", log_dir, *flags, ranks=ranks)
    assert done.returncode == 0, done.stderr
    (record,) = metrics(log_dir)
    assert not (log_dir / "config.toml").exists() and (log_dir / "evaluation.toml").exists()
    return done.stdout, record


def whole_loss(folder: Path, document: list[int]) -> float:
    """Nats a target of a document, by transformers: windows of LENGTH inputs, the last one shorter."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_positions": LENGTH, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS}
    theirs = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, tie_word_embeddings=False, **sizes)).eval()
    theirs.load_state_dict(to_transformers(read_checkpoint(folder / "run" / "iter_0000002")))
    total = 0.0
    for at in range(0, len(document) - 1, LENGTH):
        ids = torch.tensor([document[at : at + LENGTH + 1]])
        with torch.no_grad():
            logits = theirs(ids[:, :-1]).logits[0].double()
        total += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
    return total / (len(document) - 1)


def test_the_whole_split_once(run) -> None:
    """46 targets in five samples, the last of two targets, on global batches of four; every layout."""
    folder, documents = run
    wanted = whole_loss(folder, documents[9])
    layouts = [(1, []), (2, ["--pipeline-model-parallel-size", 2, "--micro-batch-size", 2]), (3, ["--zero-stage", 3])]
    layouts += [(2, ["--context-parallel-size", 2])]
    for ranks, flags in layouts:
        said, record = evaluate(folder, "--eval-split", "test", "--eval-iters", 0, *flags, ranks=ranks)
        assert record["targets"] == len(documents[9]) - 1
        assert abs(record["test_loss"] - wanted) < NEAR * wanted
        assert record["perplexity"] == pytest.approx(math.exp(wanted), rel=wanted * NEAR)
        assert (record["iteration"], record["consumed_samples"], record["eval_split"]) == (2, 8, "test")
        assert f"iteration 2: test loss {wanted:.4f} | perplexity {math.exp(wanted):.4g} | 46 targets" in said
    assert len(metrics(folder / "run")) == 2 and not (folder / "run" / "iter_0000003").exists()


@pytest.mark.parametrize("flags", by_default(["", "--zero-stage 3"], 1))
def test_the_first_batches_are_those_of_training(flags: str, run) -> None:
    """The same loss as --eval-interval's, in another layout; --save of the run's own preset does not matter."""
    folder, _ = run
    preset = ["--preset", folder / "run" / "config.toml"]
    _, record = evaluate(folder, *preset, *flags.split(), "--eval-iters", 3, ranks=2)
    assert record["targets"] == 3 * 4 * LENGTH
    assert record["validation_loss"] == pytest.approx(metrics(folder / "run")[-1]["validation_loss"], rel=NEAR)


def test_a_signal_ends_an_evaluation(run) -> None:
    folder, _ = run
    common = [*SIZES, "--data-path", folder / "words", "--split", "8,1,1", "--load", folder / "run", "--eval-only"]
    done = warm("tests/end_to_end/signalled.py", *common, "--eval-iters", 4)
    assert done.returncode == 75 and "stopped by SIGUSR1 after 25% of the evaluation: no result" in done.stdout, (
        done.stderr
    )


def test_a_blend_says_the_loss_of_each_corpus(run) -> None:
    folder, documents = run
    write_corpus(folder / "other", "<u2", [[[i % 7 for i in range(30)]] for _ in range(10)])
    blend = ["--data-path", 1, folder / "words", 3, folder / "other", "--eval-split", "test", "--eval-iters", 0]
    said, record = evaluate(folder, *blend)
    losses = record["loss_by_corpus"]
    assert losses[str(folder / "words")] == pytest.approx(whole_loss(folder, documents[9]), rel=NEAR)
    both = (46 * losses[str(folder / "words")] + 29 * losses[str(folder / "other")]) / 75
    assert record["targets"] == 75 and record["test_loss"] == pytest.approx(both, rel=1e-9)
    assert f"{losses[str(folder / 'other')]:.4f}  {folder / 'other'}" in said


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--load {0}/run --eval-split test --split 9,1", "its test split (--split 9,1) holds 0 tokens in 0 of 10"),
        ("--load {0}/nothing", "--eval-only: --load {0}/nothing holds no checkpoint; give the --save folder of a run"),
        ("", "--eval-only needs --load DIR; add it, or drop --eval-only"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(flags: str, words: str, run, tmp_path: Path) -> None:
    folder, _ = run
    here = [*SIZES, "--data-path", folder / "words", "--split", "8,1,1", "--log-dir", tmp_path / "log", "--eval-only"]
    refused = pretrain(*here, *flags.format(folder).split())
    assert refused.returncode == 1 and words.format(folder) in refused.stderr
    assert not (tmp_path / "log").exists()
