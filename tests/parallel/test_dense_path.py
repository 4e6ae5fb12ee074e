"""The size of the nave: the engine's functions that a dense model runs."""

import pytest

from tests.dense_path import ENGINE, dense_path

MOST_LINES = 5_000  # of functions, with their docstrings
ANNEXES = "model/experts model/context_parallel/pieces optim/muon zero/off_device kernels/triton".split()


@pytest.mark.second
def test_a_dense_model_runs_few_lines() -> None:
    """And it runs nothing of experts, context parallelism, Muon, or states outside the device."""
    found = dense_path()
    assert ENGINE / "step" / "interpreter.py" in found and ENGINE / "zero" / "weights.py" in found
    assert sum(found.values()) <= MOST_LINES, found
    entered = {str(path.relative_to(ENGINE)) for path in found}
    assert not {name for name in entered for annex in ANNEXES if name.startswith(annex)}
