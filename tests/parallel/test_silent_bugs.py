"""`megazero verify` fails with silent bugs of other systems planted; docs/results/silent_bugs.md has all."""

import pytest

from megazero.verify.command import verdict_of
from tests.helpers.silent_bugs import read_bugs

BUGS = {
    "ROCm/TransformerEngine#715": "the first thing that differs is the gradient norm of step 1",
    "NVIDIA/Megatron-LM#7513": "the first thing that differs is the loss of step 1",
    "deepspeedai/DeepSpeed#5545": "the first thing that differs is the gradient",
    "NVIDIA/Megatron-LM#6920": "in the same layout: the first thing that differs is the loss of step 2",
}


@pytest.mark.second
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_of_another_system_is_found(name: str) -> None:
    (bug,) = (each for each in read_bugs() if each.where[0] == name)
    proof = bug.verify()
    assert not proof.passed
    assert BUGS[name] in verdict_of(proof)
