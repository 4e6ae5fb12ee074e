"""tests/same_bits.py: the comparison of two trees."""

import copy
import math

from megazero.flags.cli import read
from tests.helpers.table import for_each
from tests.same_bits import LAYOUTS, MODEL, RUN, TRAINING, Trees, differences

BEFORE: Trees = {
    name: {
        "loss": [4.5, 4.25, math.nan],
        "memory_bytes": [{"peak": 1024, "host": 0}, {"peak": 2048, "host": 0}],
        "checkpoint": {"model.head.weight": "float32 0123"},
    }
    for name in ("plain", "dp 2")
}


def test_equal_trees_do_not_differ() -> None:
    assert differences(BEFORE, copy.deepcopy(BEFORE)) == []


@for_each(
    ("quantity", "changed", "complaint"),
    [
        ("loss", [4.5, math.nextafter(4.25, 5), math.nan], "loss 2: 4.25 before"),
        ("loss", [4.5, 4.25, 0.0], "loss 3: nan before"),
        ("loss", [4.5, 4.25], "loss 3: nan before, missing now"),
        ("memory_bytes", [{"peak": 1024, "host": 0}, {"peak": 2047, "host": 0}], "memory_bytes 2 peak: 2048 before"),
        ("checkpoint", {"model.head.weight": "float32 0124"}, "checkpoint model.head.weight"),
        ("checkpoint", {}, "checkpoint model.head.weight"),
    ],
)
def test_one_changed_number_is_named(quantity: str, changed: object, complaint: str) -> None:
    now = copy.deepcopy(BEFORE)
    now["dp 2"][quantity] = changed
    found = differences(BEFORE, now)
    assert len(found) == 1 and found[0].startswith(f"dp 2: {complaint}")
    assert differences(now, BEFORE)


def test_a_layout_that_is_missing_differs() -> None:
    assert differences(BEFORE, {"plain": BEFORE["plain"]})
    assert differences({"plain": BEFORE["plain"]}, BEFORE)


def test_layouts_are_command_lines() -> None:
    assert len(LAYOUTS) == 28
    for layout in LAYOUTS.values():
        words = f"{MODEL} {TRAINING} {RUN} --global-batch-size {layout.batch} {layout.flags}".split()
        assert read(words, lambda size=layout.ranks: size).config.training.train_iters == 3
