#!/usr/bin/env python3
"""A training step of this tree against the same step of an older revision, side by side in one run.

The older revision is checked out into a temporary folder. Both trees' processes stay alive and take turns, old, new,
new, old, ...; a ratio is new / old of neighbouring turns, with the 95 % bootstrap interval of its median.

Both trees have torch's own fp32 products.

- CPU ms: user and system time of a rank's whole process per step, all threads. Other load on the machine changes it
  less than it changes the duration.
- MiB of a step: the most bytes at once of all tensors that a step makes, counted at every operator; exact.
- MiB tracked: the memory tracker's peak: parameters and optimizer states too, but not what autograd saves; exact.

It also counts, in both trees, the lines and the public names of `megazero/`, and the files in which autograd hooks or
weak references decide about the order of events.

    python benchmarks/before_after.py --revision 736be37
"""

from __future__ import annotations

import ast
import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console
from rich.table import Table

from benchmarks.measure import interval
from benchmarks.peers import Work
from benchmarks.processes import ROOT, Job, alive, quotients, take_turns

HOOKS = {"register_hook", "register_full_backward_hook", "register_multi_grad_hook", "saved_tensors_hooks"}
HOOKS |= {"register_post_accumulate_grad_hook", "register_forward_pre_hook", "register_forward_hook", "weakref"}
MIB = 2**20


@dataclass(frozen=True)
class Options:
    """A training step of this tree against the same step of an older revision."""

    revision: str = "736be37"
    """Revision that this tree is compared with."""
    layers: int = 6
    hidden: int = 512
    heads: int = 8
    seq_length: int = 128
    vocabulary: int = 8192
    batch: int = 2
    """Samples of a rank's step, in two micro-batches."""
    ranks: tuple[int, ...] = (1, 2)
    stages: tuple[int, ...] = (0, 3)
    """ZeRO stages."""
    recompute: tuple[str, ...] = ("none", "full")
    rounds: int = 12
    """Turns of each tree."""
    steps: int = 4
    """Steps of a turn."""
    warm_up: int = 4
    """Steps before the first turn."""
    json: str = ""
    """FILE for all that was measured."""


@contextlib.contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """The tree of a revision, in a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="megazero-before-") as folder:
        tree = Path(folder, "tree")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), revision], check=True)
        try:
            for name in ("benchmarks/own_steps.py", "benchmarks/commands.py", "tests/helpers/ranks.py"):
                shutil.copy(ROOT / name, tree / name)
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def compare(before: Path, name: str, ranks: int, options: Options) -> dict[str, Any]:
    """Measure one configuration in both trees: {"before" or "after": {"cpu", "seconds", "alive", "tracked"}}."""
    shape = (options.layers, options.hidden, options.heads, options.seq_length, options.vocabulary, options.batch)
    work = Work(*shape, ranks, "fp32")
    found = {}
    with alive([Job(name, work, "benchmarks.own_steps", root=tree) for tree in (before, ROOT)]) as processes:
        for label, tree in zip(("before", "after"), processes, strict=True):
            tree.system = label
            tree.ask("build")
            losses = tree.ask("losses", options.warm_up)[0]["losses"]
            rank_bytes = tree.ask("check")
            found[label] = {kind: max(r[kind] for r in rank_bytes) for kind in rank_bytes[0]} | {"losses": losses}
        turns = take_turns(processes, options.rounds, options.steps, isolated=False)
    gap = max(abs(a / b - 1) for a, b in zip(found["before"]["losses"], found["after"]["losses"], strict=True))
    assert gap < 1e-5, f"the trees do not train the same model: {found}"
    return {label: found[label] | turns[label] for label in found}


def counts(tree: Path) -> dict[str, int]:
    """Lines and public names of `megazero/`; files in which hooks or weak references are used."""
    paths = sorted((tree / "megazero").rglob("*.py"))
    parsed = {path: ast.parse(path.read_text()) for path in paths}
    trains = {path: m for path, m in parsed.items() if path.parent.name != "price" and path.name != "allocated.py"}
    hooked = [path for path, module in trains.items() if HOOKS & set(_names(module))]  # those two only count
    return {
        "files": len(paths),
        "lines": sum(len(path.read_text().splitlines()) for path in paths),
        "lines that are neither blank, comment nor docstring": sum(map(_code_lines, parsed.values())),
        "public names: classes, functions, methods": sum(map(_public, parsed.values())),
        "files with hooks or weak references": len(hooked),
    }


def _names(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, (ast.Name, ast.Attribute)):
            yield node.id if isinstance(node, ast.Name) else node.attr


def _code_lines(module: ast.Module) -> int:
    """Lines on which some statement other than a docstring stands."""
    lines: set[int] = set()
    for node in ast.walk(module):
        constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, (ast.expr, ast.stmt, ast.arg, ast.alias)) and not constant:
            lines |= {node.lineno, node.end_lineno or 0}
    docstrings = {
        line
        for node in ast.walk(module)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    return len(lines - docstrings)


def _public(module: ast.Module) -> int:
    kinds = (ast.ClassDef, ast.FunctionDef)
    top = [node for node in module.body if isinstance(node, kinds) and not node.name.startswith("_")]
    methods = [
        inner
        for node in top
        if isinstance(node, ast.ClassDef)
        for inner in node.body
        if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_")
    ]
    return len(top) + len(methods)


def _row(ranks: int, name: str, found: dict[str, Any]) -> list[str]:
    old, new = found["before"], found["after"]
    cells = [str(ranks), *name.split()]
    for kind, digits, scale in (("cpu", 0, 1000), ("seconds", 0, 1000)):
        ratios = quotients(new[kind], old[kind])
        low, high = interval(ratios)
        medians = [f"{scale * statistics.median(tree[kind]):.{digits}f}" for tree in (old, new)]
        cells += [*medians, f"{statistics.median(ratios):.3f} [{low:.3f}, {high:.3f}]"]
    return cells + [f"{tree[kind] / MIB:.2f}" for kind in ("alive", "tracked") for tree in (old, new)]


def main(options: Options) -> None:
    console = Console(width=160, soft_wrap=True)
    table = Table(title=f"{options.revision} (before) against this tree (after)")
    for column in ("ranks", "stage", "recompute", "CPU ms before", "after", "ratio", "ms before", "after", "ratio"):
        table.add_column(column)
    for column in ("MiB of a step before", "after", "MiB tracked before", "after"):
        table.add_column(column)
    results = {}
    with checked_out(options.revision) as before:
        for ranks in options.ranks:
            for name in [f"{stage} {recompute}" for stage in options.stages for recompute in options.recompute]:
                results[f"{ranks} {name}"] = found = compare(before, name, ranks, options)
                table.add_row(*_row(ranks, name, found))
                console.print("  ".join(_row(ranks, name, found)), highlight=False)
        counted = counts(before), counts(ROOT)
    console.print(table)
    for key in counted[0]:
        console.print(f"{key}: {counted[0][key]:,} before, {counted[1][key]:,} after", highlight=False)
    if options.json:
        Path(options.json).write_text(json.dumps({"results": results, "counts": counted}))


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Options))
