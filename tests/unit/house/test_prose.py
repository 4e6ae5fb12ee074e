"""Our English keeps its rules (`tests/helpers/prose.py`), and every rule sees a sentence that breaks it."""

import pytest

from tests.helpers import prose
from tests.helpers.table import for_each

BROKEN = [
    "Waits. Of a cut stream a linear keeps its rank's tokens.",
    "Views that it has returned need it not.",
    "Return what autograd keeps.",
    "Whatever the sizes are, offsets follow.",
    "It waits, for the others may fail.",
    "It waits, for it cannot fail.",
    "The table says when.",
    "There is no word from rank 3.",
    "A run goes on from its checkpoint.",
    "The file is not there.",
    "Which checkpoints are there.",
    "Tensors that lie in host memory.",
    "The folder beside it.",
    "The ranks were not started alike.",
    "A file of so many bytes.",
    "The option is otherwise in this run.",
    "The arena is made anew.",
    "The step under way ends.",
    "Training settled on a size.",
]
FINE = [
    "What does a step hold?",
    "Wait for the others, for example at the end.",
    "Buffers of 3 MB for the second group, otherwise none.",
    'The key `what` and the text "it goes on" are quoted.',
    "It is underway.",
]


@for_each("sentence", BROKEN)
def test_a_rule_sees_its_sentence(sentence: str) -> None:
    assert list(prose.of_text(sentence))


@for_each("sentence", FINE)
def test_plain_sentences_pass(sentence: str) -> None:
    assert list(prose.of_text(sentence)) == []


def test_every_rule_has_a_sentence() -> None:
    assert all(any(pattern.search(sentence) for sentence in BROKEN) for pattern, _ in prose.COMPILED)


@for_each(
    ("source", "line"),
    [
        ('def f():\n    """Of the gradient."""', 2),
        ('class A:\n    x: int = 0\n    """Where samples come from."""', 3),
        ("x = 1\n# It waits, for they\n# fail.", 2),
        ("def f(n):\n    raise ValueError(f'rank {n} says nothing')", 2),
        ("def f(n):\n    print('rank 3 says nothing at all')", 2),
        ("def f(n):\n    return 'more' * bool(n)", 2),
        ("def f(n):\n    return [n] * (n > 3)", 2),
    ],
)
def test_python_is_read_for_its_prose(source: str, line: int) -> None:
    assert [number for number, _ in prose.of_python(source)] == [line]


def test_what_is_code_is_not_prose() -> None:
    source = 'def f(n):\n    """Return n: `what` it is."""\n    return "-" * n + "what" + "says"'
    assert list(prose.of_python(source)) == []


def test_pages_and_scripts_are_read() -> None:
    page = "# A\n\nOne line.\nIt goes on here.\n\n```\nwhat it says\n```\n\n- It lies here.\n"
    assert [number for number, _ in prose.of_page(page)] == [3, 10]
    assert [number for number, _ in prose.of_script("#!/bin/bash\necho what  # says it\n")] == [2]


@pytest.mark.second
@for_each("folder", ["megazero", "scripts", "data_tools", "benchmarks", "tests", "docs", ""])
def test_the_prose_keeps_the_rules(folder: str) -> None:
    files = [p for p in prose.everything() if (p.relative_to(prose.ROOT).parts[0] == folder) == bool(folder)]
    files = files if folder else [p for p in files if len(p.relative_to(prose.ROOT).parts) == 1]
    assert files
    assert [f"{path.relative_to(prose.ROOT)}:{line}: {c}" for path in files for line, c in prose.complaints(path)] == []


def test_the_files_with_prose_are_found() -> None:
    found = {str(path.relative_to(prose.ROOT)) for path in prose.everything()}
    assert {"README.md", "CHANGELOG.md", "megazero/engine/zero/zero.py", "docs/memory.md", "pretrain_gpt.py"} <= found
    assert {"scripts/launch.sh", "scripts/presets/tiny.toml", "data_tools/peek.py"} <= found
