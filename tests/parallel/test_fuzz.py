"""Random layouts train the same model as one process; `make fuzz` draws more of them, on more ranks."""

import pytest

from megazero.verify.verification import Verification
from tests.fuzz import Draw, command_line

SEEDS, DEAR = range(10), (1, 2, 5, 7, 8, 9)  # the latter are on three ranks or four


@pytest.mark.second
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.slow if seed in DEAR else ()) for seed in SEEDS])
def test_a_random_layout_trains_the_same_model(seed: int) -> None:
    wanted = Draw(seed, max_world=4).pair()
    proof = Verification(wanted).run()
    assert proof.passed, (command_line(wanted), proof.first, proof.lost)
