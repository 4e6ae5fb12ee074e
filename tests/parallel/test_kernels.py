"""Training steps with Triton's kernels, in its interpreter, against torch's operators, in several layouts."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.families import of_family
from tests.helpers.kernel_checks import require_triton
from tests.helpers.rounding import model_tolerance
from tests.parallel.cases import Case, Outcome, train
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


class Launches(TorchDispatchMode):
    """Names the operators that launch a kernel of Triton's."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "megazero":
            self.names.add(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


def train_and_name(rank: int, case: Case) -> tuple[Outcome, set[str]]:
    with Launches() as launches:
        return train(rank, case, 1), launches.names


@pytest.mark.parametrize(
    ("architecture", "sp"),
    [
        ("gpt2", True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("gpt2", False), ("llama", True), ("qwen3", True))),
    ],
)
def test_steps_are_those_of_torchs_operators(ranks, architecture: str, sp: bool) -> None:
    """A step of two tensor-parallel ranks: loss, gradient norm, and all bytes."""
    require_triton()
    model = replace(TINY, **of_family(architecture))
    if architecture == "qwen3":
        model = replace(model, qk_layernorm=True, kv_channels=6, num_query_groups=1)
    case = Case(tp=2, sp=sp, batch=2, micro_batches=1, model=model)
    ours, theirs = (ranks(2).run(train_and_name, case._replace(kernels=k)) for k in ("triton", "eager"))
    made = {"rms_norm", "rms_norm_grad", "swiglu", "swiglu_grad_", "rotary_"}
    if architecture == "gpt2":
        made = {"layer_norm_grad", "gelu_grad_"}
    for (mine, launched), (wanted, none) in zip(ours, theirs, strict=True):
        assert launched == made | {"dropout", "loss_sums", "loss_grad_", "add_rows_"} and not none
        assert relative_error(mine.losses, wanted.losses) < model_tolerance(case.model, torch.float32)
        assert relative_error(mine.norms, wanted.norms) < model_tolerance(case.model, torch.float32)
        assert mine.sent == wanted.sent and mine.memory == wanted.memory
