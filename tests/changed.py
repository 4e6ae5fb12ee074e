"""Run the unit tests of the files that changed: those not committed, and those of this branch.

    python -m tests.changed [REVISION]    # changed since the merge base with REVISION; main if none is given

A test file is chosen if it changed, or if it imports a changed module: itself, through other tests or helpers, or, if
no test does so, in the fewest steps. Tests of rules (style, prose, documents) always run.
"""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("megazero", "data_tools", "tests")
RULES = (
    *(f"tests/unit/house/test_{name}.py" for name in ("house", "prose", "docs", "changelog")),
    "tests/unit/suite/test_mutations.py",
)


def git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.split("\n")[:-1] if done.returncode == 0 else []


def changed_files(revision: str) -> set[str]:
    """Return paths below the root; a branch that git does not know counts as the last commit."""
    base = (git("merge-base", "HEAD", revision) or ["HEAD"])[0]
    return {*git("diff", "--name-only", base), *git("ls-files", "--others", "--exclude-standard")}


def nearest_tests(files: Iterable[str], graph: grimp.ImportGraph) -> set[str]:
    """Return the modules of unit tests that import one of these files, given the graph of imports."""
    found = set[str]()
    for file in files:
        module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        if not file.endswith(".py") or module not in graph.modules:
            continue
        near, layer, seen = {module} & graph.modules, {module}, {module}
        tests = {name for name in near if is_unit_test(name)}
        while layer and not tests:
            importers = set().union(*map(graph.find_modules_that_directly_import, layer)) - seen
            helpers = {name for name in importers if name.startswith("tests.")}
            while more := set().union(*map(graph.find_modules_that_directly_import, helpers)) - importers - seen:
                importers |= more
                helpers = more
            tests, layer, seen = set(filter(is_unit_test, importers)), importers, seen | importers
        found |= tests
    return found


def is_unit_test(module: str) -> bool:
    return module.startswith("tests.unit.") and module.rpartition(".")[2].startswith("test_")


def main(revision: str = "main") -> int:
    files = changed_files(revision)
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    chosen = sorted({f"{name.replace('.', '/')}.py" for name in nearest_tests(files, graph)} - {*RULES})
    print(f"{len(files)} changed files; their tests: {' '.join(chosen) or 'none'}", flush=True)
    runs = [["-n", "0", "-m", "not slow and not gpu", *RULES]]
    if chosen:
        runs.append(
            ["-n", "2", "--dist", "worksteal", "-m", "not slow and not gpu and not second and not long", *chosen]
        )
    return max(subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT).returncode for words in runs)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
