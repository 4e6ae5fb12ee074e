"""benchmarks.predict: predicted steps next to measured ones."""

from typing import Any

import pytest

from benchmarks import predict
from tests.helpers.ranks import Program

pytestmark = pytest.mark.second


def test_predicted_steps_are_measured_without_wrappers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are new in each round, because groups stay for as long as they do."""
    made = list[tuple[int, bool]]()

    class Noted:
        def __init__(self, world: int, start: Program, seconds: float = 1.0, **flags: Any) -> None:
            self.world = world
            made.append((world, flags.get("reuse_groups", False)))

        def run(self, *_: Any) -> list[Any]:
            return [[(2.0, 1.0)]] * self.world

        def stop(self) -> None:
            made.append((-self.world, False))

    monkeypatch.setattr(predict, "Ranks", Noted)
    monkeypatch.setattr(predict.device, "measure_round", lambda *_: None)
    _, found = predict.measure(2, 1)
    assert made == [(world, False) for world in (1, 2, 4, -1, -2, -4)] * 2
    assert all(len(steps) == 2 for steps in found.values())
