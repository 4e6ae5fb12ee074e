"""tests/mutations.toml fits the code: whoever moves or changes a line that an entry names hears of it at once."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutate import BROKEN, NOTICED, UNNOTICED, Mutation, outcome, read_entries

ENTRIES = read_entries()


def test_every_fault_can_still_be_planted() -> None:
    """Else `find`, `file` or `tests` of the entry must follow the code; `make mutate` then shows that it is noticed."""
    assert not [f"{entry.fault!r}: {problem}" for entry in ENTRIES if (problem := entry.problem())]


def test_an_entry_that_does_not_fit_is_told_from_one_that_does() -> None:
    good = ENTRIES[0]
    for change, words in (
        ({"file": "megazero/nowhere.py"}, "is gone"),
        ({"find": "no such line"}, "0 times"),
        ({"find": "\n"}, "times"),
        ({"replace": good.find}, "something else"),
        ({"tests": ("tests/unit/suite/test_mutations.py::test_nothing",)}, "is gone"),
        ({"tests": ()}, "no test"),
    ):
        problem = Mutation(**{**good.__dict__, **change}).problem()
        assert problem is not None and words in problem
    assert [outcome(status) for status in (0, 1, None, 2, 4, 5)] == [UNNOTICED, NOTICED, NOTICED, *[BROKEN] * 3]


@pytest.mark.second
@pytest.mark.long
def test_a_fault_is_planted_run_and_taken_away(tmp_path: Path) -> None:
    (tmp_path / "answer.py").write_text("ANSWER = 42  # of all\n")
    (tmp_path / "test_code.py").write_text("from answer import ANSWER\n\n\ndef test_it():\n    assert ANSWER == 42\n")
    harmful = Mutation("wrong", "answer.py", "42", "41", ("test_code.py::test_it",))
    for mutation, status in ((harmful, 1), (replace(harmful, find="of all", replace="of everything"), 0)):
        assert mutation.problem(tmp_path) is None
        assert mutation.status(tmp_path) == status
        assert (tmp_path / "answer.py").read_text() == "ANSWER = 42  # of all\n"
