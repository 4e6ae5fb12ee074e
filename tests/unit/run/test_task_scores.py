"""The interval of --tasks, and the scores of results."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megazero.data.task_files import ChoiceItem, ClozeItem, TaskItems, TextItem
from megazero.data.task_requests import Pair, TaskRequests
from megazero.flags.config import Config, EvaluationConfig, ModelConfig, TrainingConfig
from megazero.observe.shown_tasks import task_scores
from megazero.run.task_scores import TaskScores, keeps_apart, task_interval, task_words
from tests.helpers.table import for_each


@for_each("samples, batch", [(1, 1), (1, 512), (3, 8), (24, 8), (1000, 96)])
def test_the_default_interval_is_the_least_that_costs_two_percent(samples: int, batch: int) -> None:
    config = replace(Config(), training=TrainingConfig(global_batch_size=batch))
    found = task_interval(config, samples)
    cost = samples / 3 / batch  # of a step: a forward is a third of it
    assert cost / found <= 0.02 * (1 + 1e-12) and (found == 1 or cost / (found - 1) > 0.02)
    assert task_interval(replace(config, evaluation=EvaluationConfig(task_interval=7)), samples) == 7


@for_each(
    "model, precision, device, expected",
    [
        ({}, "bf16", "cuda", True),
        ({}, "fp32", "cpu", True),
        ({}, "bf16", "cpu", True),  # explicit, as in training
        ({"kv_channels": 100}, "bf16", "cuda", False),
        ({"kv_channels": 100, "attention_dropout": 0.1}, "bf16", "cuda", False),  # scoring has no dropout
        ({"kv_channels": 100, "attention_softcap": 5.0}, "bf16", "cuda", True),  # explicit
        ({}, "fp32", "cuda", False),  # with documents no kernel is fused
        ({"attention_softcap": 5.0}, "fp32", "cuda", True),
        ({"attention_dropout": 0.1}, "fp32", "cuda", True),  # training's is explicit too
    ],
)
def test_requests_share_samples_where_attention_is_as_fused_as_that_of_training(
    model: dict[str, Any], precision: Any, device: str, expected: bool
) -> None:
    sizes = ModelConfig(num_layers=1, hidden_size=128, num_attention_heads=2, vocab_size=257, seq_length=8, **model)
    config = replace(Config(), model=sizes, training=TrainingConfig(precision=precision))
    assert keeps_apart(config, device) == expected


def test_the_start_screen_counts_items_requests_and_samples() -> None:
    """30 samples, whose forwards cost as much as 10 of training: 5 % of 50 steps of 4."""

    class Packed(SimpleNamespace):
        def __len__(self) -> int:
            return 30

    tasks = SimpleNamespace(counts={"a": 1234, "b": 7})
    packed: Any = Packed(requests=SimpleNamespace(tasks=tasks, pairs=range(91)))
    config = replace(Config(), training=TrainingConfig(global_batch_size=4, train_iters=1000))
    text = "a 1,234, b 7: 91 requests in 30 samples"
    for interval, words in ((50, "every 50 iterations and after the last, 5.0% of the time"), (1000, "after the last")):
        asked = replace(config, evaluation=EvaluationConfig(task_interval=interval))
        assert task_words(asked, packed).startswith(f"{text}; scored {words}"), interval
    assert task_words(config, packed).endswith("every 125 iterations and after the last, 2.0% of the time")
    assert task_words(replace(config, evaluation=EvaluationConfig(eval_only=True)), packed) == text


def test_scores() -> None:
    """The first of equal options is chosen; bytes, not characters, divide; the last option counts."""
    items = (
        ChoiceItem(task="a", context="", choices=("é", "ab", "abcd"), answer=2),
        ChoiceItem(task="a", context="", choices=("x", "y"), answer=0),
        ClozeItem(task="b", context="", continuation="x"),
        ClozeItem(task="b", context="", continuation="y"),
        TextItem(task="c", text="é", domain="d"),
        TextItem(task="c", text="abcdef"),
    )
    pair = Pair([0], [0])
    requests = TaskRequests(TaskItems(items, ("",) * 6, ""), (pair,) * 10, (0, 3, 5, 6, 7, 8, 10))
    nats = [1.5, 3.0, 1.4, 2.0, 2.0, 1.0, 2.0, 4.0, 5.0, 7.0]
    found = TaskScores(requests, nats, [0, 0, 0, 0, 0, 0, 2, 1, 0, 0])
    assert [result.greedy for result in found.results()][2:] == [[True], [False], [False], [True]]
    scores = found.metrics()
    assert scores["task_items"] == {"a": 2, "b": 2, "c": 2, "c/d": 1}
    shown = [str(score) for score in task_scores(scores)]
    assert shown[:2] == ["a accuracy 1.000 ± 0.000 (2 items)", "a accuracy by byte 1.000 ± 0.000 (2 items)"]
    assert shown[-1] == "c/d bits per byte 2.8854 (1 item)"
    del scores["task_items"]
    assert str(task_scores(scores)[0]) == "a accuracy 1.000 ± 0.000"
    assert scores["task_acc"] == {"a": 1.0, "b": 0.5} and scores["task_acc_norm"] == {"a": 1.0}
    assert scores["task_acc_stderr"] == {"a": 0.0, "b": 0.5} and scores["task_acc_norm_stderr"] == {"a": 0.0}
    assert scores["task_perplexity"] == {"b": pytest.approx(math.exp(1.5))}
    assert scores["task_bits_per_byte"] == pytest.approx({"c": 16 / 8 / math.log(2), "c/d": 4 / 2 / math.log(2)})
    shifted = TaskScores(requests, [0.5, 1.8, 1.4, 3.0, 2.0, *nats[5:]], [0.0] * 10).metrics()
    assert shifted["task_acc"]["a"] == 0.0 and shifted["task_acc_norm"]["a"] == 0.0


def test_a_number_that_is_not_finite_chooses_nothing(tmp_path: Path) -> None:
    """Files have null in its place; a model of such numbers alone answers nothing."""
    items = (ChoiceItem(task="a", context="", choices=("x", "y"), answer=0),) * 2
    requests = TaskRequests(TaskItems(items, ("",) * 2, ""), (Pair([0], [0]),) * 4, (0, 2, 4))
    for nats, share in (
        ([math.nan] * 4, 0.0),
        ([math.inf] * 4, 0.0),
        ([math.nan, 3.0, 2.0, math.nan], 0.5),
    ):
        scores = TaskScores(requests, nats, [1.0] * 4)
        found = scores.metrics()
        assert found["task_acc"] == {"a": share} and found["task_acc_norm"] == {"a": share}
        scores.write(tmp_path / "tasks.jsonl")
        lines = (tmp_path / "tasks.jsonl").read_text().splitlines()
        for at, line in zip((0, 2), lines, strict=True):
            wanted = [-x if math.isfinite(x) else None for x in nats[at : at + 2]]
            assert json.loads(line, parse_constant=pytest.fail)["log_likelihoods"] == wanted
