"""`make fuzz` without ranks: pairs are drawn from their seed alone, and a pair that fails is printed to be pasted."""

import shlex

import pytest

from megazero.verify.command import own_options
from megazero.verify.verification import Proof, Wanted
from tests import fuzz


def test_a_pair_is_its_seeds_and_its_command_line() -> None:
    wanted = fuzz.Draw(3).pair()
    assert wanted == fuzz.Draw(3).pair() != fuzz.Draw(4).pair()
    options, flags = own_options(shlex.split(fuzz.command_line(wanted))[2:])
    assert Wanted(flags, options.world_size, then=options.then) == wanted
    assert wanted.world_size <= fuzz.MAX_WORLD and "--world-size" in wanted.then


@pytest.mark.parametrize("passed", [True, False])
def test_a_failure_is_printed_and_is_the_exit_code(
    passed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = Wanted(["--tensor-model-parallel-size", "2"], 2, then="--zero-stage 1 --world-size 2")
    proof = Proof(passed, words=[], tables={}, first="the loss differs", lost="", seconds=1.0)

    class Proven:
        def __init__(self, wanted: Wanted) -> None: ...

        def run(self) -> Proof:
            return proof

    monkeypatch.setattr(fuzz.Draw, "pair", lambda self: wanted)
    monkeypatch.setattr(fuzz, "Verification", Proven)
    assert fuzz.main(["--seed", "7", "--pairs", "2"]) == (not passed)
    shown = capsys.readouterr().out
    assert ("seed 8: FAIL: the loss differs" in shown) == (not passed)
    command = (
        "python scripts/verify.py --world-size 2 --tensor-model-parallel-size 2 --then '--zero-stage 1 --world-size 2'"
    )
    assert (command in shown) == (not passed)
