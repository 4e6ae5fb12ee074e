"""Refusals of a configuration that name values: every one of them, put into the command line, resolves."""

import re

import pytest

from megazero.engine.model.stage import declare
from megazero.flags.cli import parse
from megazero.flags.resolve import resolve
from tests.helpers.table import for_each

BASE = "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --vocab-size 1000"
V, TURNS = "--pipeline-schedule zero-bubble-v", "--pipeline-schedule interleaved"
# (command line, ranks, the end of the refusal, flag that takes its values); * is where the values are
CASES = [
    ("--hidden-size 770", 1, "use * heads", "num-attention-heads"),
    ("--hidden-size 97", 1, "use * head", "num-attention-heads"),
    ("--architecture llama --num-query-groups 5", 1, "use one of *", "num-query-groups"),
    ("--architecture llama --num-query-groups 2 --tensor-model-parallel-size 3", 0,
     "use a --tensor-model-parallel-size of *", "tensor-model-parallel-size"),
    ("--tensor-model-parallel-size 5", 0, "use a --tensor-model-parallel-size of *, or", "tensor-model-parallel-size"),
    ("--num-attention-heads 4 --ffn-hidden-size 6 --tensor-model-parallel-size 4", 0,
     "use a --tensor-model-parallel-size of *, or", "tensor-model-parallel-size"),
    ("--pipeline-model-parallel-size 16", 0, "use at most *", "pipeline-model-parallel-size"),
    ("--num-layers 8 --pipeline-model-parallel-size 2 --virtual-pipeline-stages 5 " + TURNS, 2,
     "use at most * virtual stages", "virtual-pipeline-stages"),
    ("--num-layers 7 --pipeline-model-parallel-size 4 --virtual-pipeline-stages 2 " + TURNS, 4,
     "use at most * stages", "pipeline-model-parallel-size"),
    ("--num-layers 7 --pipeline-model-parallel-size 4 --virtual-pipeline-stages 2 " + V, 4,
     "use at most * stages", "pipeline-model-parallel-size"),
    ("--pipeline-model-parallel-size 2 --virtual-pipeline-stages 3 " + V, 2, "use *, or", "virtual-pipeline-stages"),
    ("--global-batch-size 40000", 1, "use at most *, a larger", "global-batch-size"),
    ("--zero-shard-size 4", 6, "use *, or 0 for all", "zero-shard-size"),
    ("--zero-shard-size 4", 7, "use *, or 0 for all", "zero-shard-size"),
    ("--lr-decay-style cosine --train-iters 5 --lr-warmup-iters 5", 1, "use a --lr-warmup-iters of *, or",
     "lr-warmup-iters"),
    ("--lr-decay-style wsd --train-iters 8", 1, "such as --lr-wsd-decay-iters *, or", "lr-wsd-decay-iters"),
    ("--sequence-parallel --tensor-model-parallel-size 12 --seq-length 30", 12, "multiple of *", "micro-batch-size"),
    ("--pipeline-split 4,4 --pipeline-model-parallel-size 3", 3, "such as *", "pipeline-split"),
    ("--pipeline-split 4,4,5 --pipeline-model-parallel-size 3", 3, "use *", "pipeline-split"),
    ("--pipeline-split 4,0,8 --pipeline-model-parallel-size 3", 3, "use *, or", "pipeline-split"),
    ("--architecture llama --num-query-groups 1 --num-attention-heads 4 --ffn-hidden-size 6 "
     "--tensor-model-parallel-size 4", 0, "use a --tensor-model-parallel-size of *, or", "tensor-model-parallel-size"),
    ("--architecture llama --num-query-groups 4 --tensor-model-parallel-size 5", 0,
     "use a --tensor-model-parallel-size of *, or", "tensor-model-parallel-size"),
    ("--architecture llama --num-experts 6 --moe-router-topk 7", 1, "use at most *", "moe-router-topk"),
    ("--architecture llama --num-experts 6 --moe-layer-freq DDDDDDDDDDDDE", 1, "use *", "moe-layer-freq"),
    ("--architecture llama --num-experts 6 --moe-ffn-hidden-size 20 --tensor-model-parallel-size 3", 0,
     "use a --tensor-model-parallel-size of *, or", "tensor-model-parallel-size"),
    ("--architecture llama --num-experts 6 --moe-shared-expert-intermediate-size 20 --tensor-model-parallel-size 3", 0,
     "use a --tensor-model-parallel-size of *, or", "tensor-model-parallel-size"),
    ("--global-batch-size 64 --rampup-batch-size 4 7 1000", 4, "use *", "rampup-batch-size 4 {} 1000"),
    ("--global-batch-size 56 --rampup-batch-size 8 49 1000", 4, "use *", "rampup-batch-size 8 {} 1000"),
]  # fmt: skip


@for_each(("line", "ranks", "end", "flag"), CASES)
def test_every_value_that_a_refusal_names_resolves(line: str, ranks: int, end: str, flag: str) -> None:
    """0 ranks: as many as tensor x pipeline, which the value changes."""
    words = [*BASE.split(), *line.split()]

    def resolved(words: list[str]) -> None:
        config = parse(words)
        each = config.parallel.tensor_model_parallel_size * config.parallel.pipeline_model_parallel_size
        resolve(config, ranks if ranks and ranks % each == 0 else each, 0, declare)

    with pytest.raises(ValueError, match=r"^--[a-z-]+ ") as refused:
        resolved(words)
    before, after = end.split("*")
    named = re.search(rf"{re.escape(before)}([\d, or]*\d){re.escape(after)}", str(refused.value).rpartition("; ")[2])
    assert named, str(refused.value)
    values = [named[1]] if flag == "pipeline-split" else re.findall(r"\d+", named[1])
    for value in values:
        resolved([*words, *f"--{flag if '{}' in flag else flag + ' {}'}".format(value).split()])
