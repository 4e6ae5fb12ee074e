"""CHANGELOG.md keeps its form: three headings, short entries, no doubles, and flags that exist."""

import difflib
import itertools
import re
from collections.abc import Iterator

import pytest

from megazero.flags.flag_names import flags
from megazero.flags.foreign.flag_table import read_tables
from megazero.flags.foreign.translate import OWN_WORDS
from tests.helpers.programs import ROOT
from tests.helpers.table import for_each

HEADINGS = ["Added", "Changed", "Fixed"]
MAX_ALIKE = 0.75  # difflib ratio of two entries


def entries(text: str) -> list[str]:
    """Return the entries of a changelog, each with its lines joined by newlines."""
    return [entry.strip("\n") for entry in re.split(r"^(?=- )", text, flags=re.MULTILINE)[1:]]


def known_flags() -> set[str]:
    """Return our flags, and those of other systems or retired ones that are answered."""
    return {*flags(), *OWN_WORDS, *read_tables()}


def faults(text: str) -> Iterator[str]:
    """Yield each violation of the form."""
    _, *releases = re.split(r"^## .*\n", text, flags=re.MULTILINE)
    for release in releases:
        headings = re.findall(r"^### (.*)$", release, re.MULTILINE)
        if headings != [heading for heading in HEADINGS if heading in headings]:
            yield f"headings {headings}: must be {HEADINGS}, in this order"
        for line in release.splitlines():
            if line and not line.startswith(("- ", "  ", "### ")):
                yield f"'{line}' belongs to no entry"
    found = [re.split(r"\n#", entry)[0].strip() for entry in entries(text)]
    for entry in found:
        if len(entry.splitlines()) > 2:
            yield f"'{entry}' has more than two lines"
        if not re.match(r"- [A-Z`]", entry) or not re.search(r"[^.]\.$", entry):
            yield f"'{entry}' must start with a capital or a backtick and end with a full stop"
        for flag in re.findall(r"--([a-z][a-z0-9-]+)", entry):
            if flag not in known_flags():
                yield f"'{entry}' names --{flag}, which does not exist"
    for one, other in itertools.combinations(found, 2):
        if difflib.SequenceMatcher(None, one, other).ratio() > MAX_ALIKE:
            yield f"'{one}' repeats '{other}'"


@pytest.mark.second
def test_the_changelog_keeps_its_form() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert list(faults(text)) == []
    assert 20 < len(entries(text)) <= 60


@for_each(
    ("text", "fault"),
    [
        ("### Fixed\n- A bug.\n### Added\n- A thing.", "in this order"),
        ("### GPUs\n- A thing.", "headings"),
        ("### Added\n- A thing.\ntorn off", "belongs to no entry"),
        ("### Added\n- A thing\n  and more\n  and more.", "more than two lines"),
        ("### Added\n- a thing.", "capital"),
        ("### Added\n- A thing", "full stop"),
        ("### Added\n- `--lrr` is new.", "--lrr"),
        ("### Added\n- Blends of corpora with weights.\n- Blends of corpora without weights.", "repeats"),
    ],
)
def test_a_fault_is_found(text: str, fault: str) -> None:
    assert any(fault in found for found in faults(f"# Changelog\n## Unreleased\n{text}\n"))
