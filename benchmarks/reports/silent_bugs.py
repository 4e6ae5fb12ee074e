"""Generate docs/results/silent_bugs.md: silent bugs of other systems, planted here, and whether megazero verify fails.

python -m benchmarks.reports.silent_bugs
"""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.reports.blocks import markdown
from megazero.cluster import local
from megazero.files import replace_file
from megazero.log import log
from megazero.verify.command import verdict_of
from tests.helpers.silent_bugs import SilentBug, read_bugs

PAGE = Path(__file__).parents[2] / "docs" / "results" / "silent_bugs.md"
HEAD = """\
# Silent bugs of other systems

A silent bug trains another model without an error. `python -m benchmarks.reports.silent_bugs` writes this page from
[`tests/silent_bugs.toml`](../../tests/silent_bugs.toml). For each bug, it plants an equivalent fault in our code, and
runs `megazero verify` on a small layout. The last column has the first sentence of its verdict. Without a fault,
each of these layouts passes. Dates are of issues, pull requests or comments in them. * marks a thread that was not
read.

"""
UNNOTICED = """\
A fault that one process has too is missed, because both then train the same wrong model. Tests next to plain PyTorch,
or next to one document alone, notice it: the row names them.
"""
COLUMNS = [
    "bug",
    "date",
    "error",
    "effect",
    "why not here",
    "planted in",
    "`megazero verify` alone catches it",
]


def check_without_faults(bugs: list[SilentBug]) -> None:
    """Run each layout without a fault.

    Raises:
        RuntimeError: it does not pass, so that a failure with a fault would show nothing.
    """
    for bug in {(bug.flags, bug.world): bug for bug in bugs}.values():
        proof = bug.verify(planted=False)
        if not proof.passed:
            raise RuntimeError(f"{bug.flags}: {verdict_of(proof)}")


def link(name: str) -> str:
    repository, number = name.split("#")
    return f"[{name}](https://github.com/{repository}/issues/{number})"


def verdict(bug: SilentBug) -> tuple[bool, str]:
    """Return whether the command fails with the bug planted, and its first sentence."""
    proof = bug.verify()
    if proof.passed:
        return False, f"no; {bug.test} fails" if bug.test else "no"
    sentence = verdict_of(proof).removeprefix("FAIL: ").split(" (by ")[0].split(";")[0]
    return True, f"yes: {sentence}"


def page(bugs: list[SilentBug]) -> Iterator[str]:
    """Yield the parts of the page."""
    rows, caught = [], 0
    for bug in bugs:
        found, words = verdict(bug)
        caught += found
        log.info(f"{bug.where[0]}: {words}")
        where = ", ".join(map(link, bug.where)) + ("" if bug.read else " *")
        planted = f"`{'.'.join(filter(None, (bug.fault.owner, bug.fault.function)))}`"
        rows.append([where, bug.date, bug.wrong, bug.effect, bug.ours, planted, words])
    yield HEAD
    yield markdown(COLUMNS, rows)
    yield f"\n\n**{caught} of {len(bugs)}** are caught by `megazero verify` alone.\n"
    if caught < len(bugs):
        yield f"\n{UNNOTICED}"


if __name__ == "__main__":
    local.preload(["megazero.verify.training"])
    known = read_bugs()
    check_without_faults(known)
    replace_file(PAGE, "".join(page(known)))
