"""Pages of docs/ that a command writes are those of today's code."""

import re

import pytest

from benchmarks.eight_layouts import LAYOUTS
from benchmarks.reports import dealing, families, foreign, modules
from megazero.engine.model.stage import declare
from megazero.families import FAMILIES
from megazero.flags.cli import parse
from megazero.flags.foreign.flag_table import FLAGS, find_entry, read_table
from megazero.flags.foreign.translate import is_ours
from megazero.flags.resolve import resolve
from tests.helpers.programs import ROOT
from tests.helpers.table import for_each

pytestmark = pytest.mark.second

ENTRIES = [entry for table in FLAGS for entry in read_table(table)]


def test_the_page_of_dealing_has_the_imbalance_of_one_document() -> None:
    """Made again by `python -m benchmarks.reports.dealing`."""
    assert dealing.one_document()["one document"] in dealing.PAGE.read_text()


def test_the_page_of_modules_is_that_of_their_docstrings() -> None:
    """Made again by `python -m benchmarks.reports.modules`."""
    page = list(modules.page())
    assert modules.PAGE.read_text() == "\n".join(page)
    assert any("| `flat_layout` | Arithmetic of a unit's flat buffer. Pure: integers only. |" in line for line in page)


def test_the_page_of_families_is_that_of_their_files() -> None:
    page = "\n".join(families.page())
    current = (ROOT / "docs" / "results" / "families.md").read_text() == page
    assert current, "docs/results/families.md is out of date: python -m benchmarks.reports.families"
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    assert rows.keys() == FAMILIES.keys()
    assert (
        "| `gemma3_text`, Gemma3ForCausalLM | RMSNorm of weight 1 + w before and after attention and MLP; tanh GEGLU; "
        "no biases; rotary positions; embeddings x sqrt(hidden size) |" in rows["gemma3"]
    )
    assert "`--untie-embeddings`, `--rotary-percent 0.25` | `pythia-1.4b`, `pythia-160m` |" in rows["gpt-neox"]


def test_the_page_of_foreign_flags_says_what_the_table_says() -> None:
    """After a change: python -m benchmarks.reports.foreign."""
    page = foreign.PAGE.read_text()
    for name, text in foreign.blocks():
        assert f"<!-- {name} -->\n{text}\n<!-- end of {name} -->" in page, name


def test_public_scripts_leave_no_word_unhelped() -> None:
    """At least 12 scripts: hardly any flag is unknown; without refused flags, a script makes a run."""
    scripts, whole = foreign.read_scripts(), 0
    assert len(scripts) >= 12
    for script in scripts:
        _, found = foreign.answers(script)
        assert sum(answer.unknown for answer in found) <= 4, script.name
        whole += not any(answer.refusal for answer in found) and not foreign.complaint(script)
    assert whole >= 6, "scripts that run as they are"


def test_entries_of_foreign_flags_name_flags_that_exist() -> None:
    for entry in ENTRIES:
        found = re.findall(r"(?<![-\w])--([a-z0-9-]+[a-z0-9])", foreign.result(entry))
        programs = {"append-eod", "input", "output-prefix", "nproc"}  # of other programs of ours
        wrong = [n for n in found if not is_ours(n) and n not in programs and find_entry(n) is None]
        assert not wrong, (entry.name, wrong)


@for_each("name", LAYOUTS)
def test_the_layouts_of_the_picture_are_legal(name: str) -> None:
    """The caption's widest layout is among them."""
    ranks, words = LAYOUTS[name]
    _, layout = resolve(parse([*"--preset tiny --vocab-size 2048".split(), *words.split()]), ranks, 0, declare)
    assert layout.world_size == ranks and len(LAYOUTS) == 8
