"""Training steps with Triton's kernels, in its interpreter, against torch's operators, in several layouts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.parallel.cases import Case, train
from tests.parallel.matrix import MODEL
from tests.parallel.test_parity import relative_error

# So small because the interpreter takes 10 ms per row: 8 tokens. The second rank has 3 words of the vocabulary.
TINY = replace(
    MODEL,
    num_layers=1,
    hidden_size=8,
    num_attention_heads=2,
    seq_length=4,
    vocab_size=67,
    hidden_dropout=0.2,
    attention_dropout=0.2,
)


@pytest.mark.parametrize(
    ("architecture", "sp"),
    [("gpt2", True), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("gpt2", False), ("llama", True)))],
)
def test_steps_are_those_of_torchs_operators(ranks, architecture: str, sp: bool) -> None:
    """A step of two tensor-parallel ranks: loss, gradient norm, and all bytes."""
    pytest.importorskip("triton", reason="no triton: torch brings it for GPUs, requirements-dev.txt for x86-64 Linux")
    case = Case(tp=2, sp=sp, batch=2, micro_batches=1, model=replace(TINY, architecture=architecture))
    ours, theirs = (ranks(2).run(train, case._replace(kernels=k), 1) for k in ("triton", "eager"))
    for mine, wanted in zip(ours, theirs, strict=True):
        assert relative_error(mine.losses, wanted.losses) < 1e-6
        assert relative_error(mine.norms, wanted.norms) < 1e-5
        assert mine.sent == wanted.sent and mine.memory == wanted.memory
