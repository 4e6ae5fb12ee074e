"""The ZeRO paper's numbers by formula, and its formulas against rehearsed ranks."""

import pytest

from benchmarks.reports.blocks import write_blocks
from benchmarks.reports.rehearsals import Asked, flags_of, rehearse_one, resolved, states
from benchmarks.reports.states import table_2_cells
from benchmarks.reports.zero_theory import (
    DEGREES,
    TABLE_1,
    TABLE_2,
    bytes_per_parameter,
    largest,
    rounded,
    table_1_cell,
    table_2_cell,
    truncated,
)
from megazero.engine.model.stage import declare
from megazero.planner.parameter_counts import num_parameters
from tests.helpers.table import for_each

pytestmark = pytest.mark.second


# cells that the paper printed cut off instead of rounded
CUT = {("128B", 1024, 1), ("128B", 1024, 2)} | {("1T", nd, stage) for nd in (64, 256, 1024) for stage in (1, 2)}


def test_table_1() -> None:
    """All 54 cells; eight are truncated, all others rounded."""
    cells = [(model, nd, stage) for model in TABLE_1 for nd in DEGREES for stage in (1, 2, 3)]
    assert len(cells) == 54
    for model, nd, stage in cells:
        printed = TABLE_1[model][DEGREES.index(nd)].split()[stage - 1]
        assert table_1_cell(model, nd, stage) == (printed, (model, nd, stage) in CUT)
    assert (rounded(41.25), truncated(41.25), rounded(1.875), rounded(120.0)) == ("41.3", "41.2", "1.88", "120")


def test_table_2() -> None:
    """All 20 cells of theory; the paper multiplies the rounded first row."""
    for mp, row in TABLE_2.items():
        assert [table_2_cell(stage, mp) for stage in range(4)] == row.split()
    assert [round(largest(stage, 1) / 1e9, 3) for stage in range(4)] == [2, 7.642, 14.423, 128]


@pytest.mark.slow
@for_each("stages", [(2,), (0, 1, 3)])
def test_table_2_by_rehearsal(stages: tuple[int, ...]) -> None:
    """The first row: the largest model of whole layers fills a device to less than a layer, and is the formula's."""
    for stage, cell in zip(stages, table_2_cells([(1, stage) for stage in stages], layers=8), strict=True):
        exact = largest(stage, 1)
        assert exact * (1 - 1.2 / cell.layers) < cell.parameters <= exact
        assert 32e9 * (1 - 1.1 / cell.layers) < cell.held <= 32e9


@pytest.mark.long
def test_a_rehearsed_ranks_states_and_traffic_are_the_formulas() -> None:
    """At 1,024 ranks, within 0.1 %: the fourth witness, which knows nothing of programs."""
    asked = Asked(1024, flags_of(1, 8192, 64, seq_length=64, zero_stage=3), rank=1023)
    found = rehearse_one(asked)
    psi = num_parameters(declare(resolved(asked)[0].model))
    assert states(found.memory) == pytest.approx(psi * bytes_per_parameter(3, 1024), rel=1e-3)
    # the block and the tied table are gathered twice and reduced; positions and the last norm are gathered once
    assert 2.99 < found.traffic["dp"] / 2 / psi * 1024 / 1023 < 3.003


def test_blocks_of_a_page(tmp_path) -> None:
    """A block's text is replaced as it is, however often; a missing one is refused."""
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- x -->\n<!-- end of x -->\nb\n")
    for text in ("old\nlines", "new \\1"):
        write_blocks(page, {"x": text})
        assert page.read_text() == f"a\n<!-- x -->\n{text}\n<!-- end of x -->\nb\n"
    with pytest.raises(ValueError, match="has 0 blocks <!-- y -->"):
        write_blocks(page, {"y": ""})
