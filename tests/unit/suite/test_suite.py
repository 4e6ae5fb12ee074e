"""Helpers of the suite itself: tables of cases, and the choice of tests for changed files."""

import importlib.util
import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import skip_without_package
from tests.helpers.programs import ROOT
from tests.helpers.table import for_each

NO_GRIMP = "not installed: grimp, of import-linter in requirements-dev.txt"


def test_every_row_runs_and_errors_name_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    @for_each("even", [True, False])
    @for_each(("a", "b"), [(1, 2), (2, 3), (3, 3)])
    def check(a: int, b: int, even: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert not list(tmp_path.iterdir()) and not hasattr(ROOT, "planted")
        (tmp_path / "file").touch()
        monkeypatch.setattr(Path, "planted", 1, raising=False)
        ran.append((even, a))
        assert a != b or not even
        assert a != 2

    with pytest.raises(ExceptionGroup) as caught:
        check(tmp_path=tmp_path, monkeypatch=monkeypatch)
    assert ran == [(even, a) for even in (True, False) for a in (1, 2, 3)]
    both, one = caught.value.exceptions
    assert isinstance(both, ExceptionGroup)
    assert [error.__notes__ for error in both.exceptions] == [["row: a=2, b=3"], ["row: a=3, b=3"]]
    assert both.__notes__ == ["row: even=True"] and one.__notes__ == ["row: a=2, b=3", "row: even=False"]
    for rows in ([], [pytest.param(1, marks=pytest.mark.slow)]):
        with pytest.raises(AssertionError):
            for_each("a", rows)


def test_a_table_is_skipped_if_each_row_that_fails_lacks_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    lacks, text = ModuleNotFoundError("No module named 'pyarrow'"), "No module named 'pyarrow'"
    for errors, outcome in (([lacks, lacks], "skipped"), ([lacks, AssertionError()], "failed")):
        report = SimpleNamespace(failed=True, outcome="failed", longreprtext=text)
        assert skip_without_package(report, ROOT, 1, ExceptionGroup("2 rows", errors)).outcome == outcome


def test_tests_of_a_changed_file_are_the_nearest_that_import_it() -> None:
    grimp = pytest.importorskip("grimp", reason=NO_GRIMP)
    from tests.changed import nearest_tests

    graph = grimp.ImportGraph()
    imports = """
        tests.unit.wing.test_a -> package.a
        tests.unit.wing.test_b -> tests.helpers.b -> tests.helpers.c -> package.a
        package.far -> package.a
        tests.unit.wing.test_far -> package.far -> package.near
        tests.parallel.test_d -> package.near
    """
    for line in imports.split("\n"):
        names = re.findall(r"[\w.]+", line)
        for importer, imported in itertools.pairwise(names):
            graph.add_import(importer=importer, imported=imported)
    graph.add_module("package.lonely")
    for file, wanted in {
        "package/a.py": "a b",
        "package/near.py": "far",
        "package/lonely.py": "",
        "tests/helpers/c.py": "b",
        "tests/unit/wing/test_a.py": "a",
        "tests/parallel/test_d.py": "",
        "docs/page.md": "",
        "package/gone.py": "",
    }.items():
        assert nearest_tests([file], graph) == {f"tests.unit.wing.test_{name}" for name in wanted.split()}, file


def test_changed_files_find_the_tests_where_they_are() -> None:
    pytest.importorskip("grimp", reason=NO_GRIMP)
    from tests.changed import RULES, is_unit_test

    files = [path.relative_to(ROOT) for path in (ROOT / "tests" / "unit").rglob("test_*.py")]
    assert len(files) > 100 and all(is_unit_test(".".join(path.with_suffix("").parts)) for path in files)
    assert not is_unit_test("tests.unit.data_helpers") and not is_unit_test("tests.parallel.test_parity")
    assert {Path(rule) for rule in RULES} <= set(files)
