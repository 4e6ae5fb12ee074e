"""The command `megazero verify`, also scripts/verify.py."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megazero.files import check_replaceable, explain, write_atomically
from megazero.flags.cli import read_own
from megazero.log import log

if TYPE_CHECKING:  # the module imports torch, for which --help does not wait
    from megazero.verify.verification import Proof

SCRIPT = "scripts/verify.py"
PASSED, FAILED, REFUSED = 0, 1, 2  # exit codes


@dataclass(frozen=True)
class Options:
    """Prove that a layout trains the same model as one process. All other flags are those of pretrain_gpt.py.

    The run is shrunk to a model and a number of ranks that train in seconds, with everything that the layout depends
    on. It is trained in one process and in the layout, in fp64 and in the run's own precision, on GPUs if there are
    enough, and compared: loss, gradient norm, every gradient, every weight and state of the optimizer, bytes against
    the plan, and a resume in the middle. docs/run.md explains the table.

    Examples:
        python scripts/verify.py --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --zero-stage 1
        python scripts/verify.py --preset zero-100b --world-size 400
        python scripts/verify.py --preset tiny --zero-stage 3 --then "--zero-stage 1 --tensor-model-parallel-size 2"

    Exit codes: 0 it is the same model; 1 something differs, or a rank failed; 2 bad flags.
    """

    world_size: int = 0
    """Ranks of the run. 0: as few as its flags allow; two replicas if --zero-stage is not 0."""
    steps: int = 3
    """Training steps. With one, nothing is resumed."""
    then: str = ""
    """Flags of the layout that resumes from a checkpoint of the middle, in quotes; --world-size too, if it has another
    number of ranks. Empty: the same layout. One process resumes from it too."""
    keep: bool = False
    """Keep as much of the model's size as fits in memory. It takes longer."""
    json: str = ""
    """File for the results, for a CI."""


def own_options(argv: list[str]) -> tuple[Options, list[str]]:
    """Return the options of this program, and the flags of the run."""
    words = list(argv)
    if "--then" in words[:-1]:  # its value begins with dashes
        at = words.index("--then")
        words[at : at + 2] = [f"--then={words[at + 1]}"]
    return read_own(Options, words, SCRIPT)


def main(argv: list[str]) -> int:
    """Verify a command line, and return the exit code."""
    options, rest = own_options(argv)
    from megazero.cluster import local
    from megazero.verify.verification import Verification, Wanted, to_json

    local.preload(["megazero.verify.training"])
    folder = Path(options.json).absolute().parent
    wanted = Wanted(rest, options.world_size, options.steps, keep=options.keep, then=options.then)
    try:
        if not folder.is_dir():
            raise ValueError(
                f"--json {options.json}: the folder {folder} does not exist; make it, or name another file"
            )
        if options.json:
            check_replaceable(options.json)
        proof = Verification(wanted).run()
    except (OSError, ValueError) as error:
        log.error(f"error: {explain(error) if isinstance(error, OSError) else error}")
        return REFUSED
    show_proof(proof)
    if options.json:
        try:
            write_atomically(options.json, json.dumps(to_json(proof, wanted), indent=1).encode())
        except OSError as error:
            log.error(f"error: --json {options.json} cannot be written: {error.strerror}")
            return REFUSED
    return PASSED if proof.passed else FAILED


def show_proof(proof: Proof) -> None:
    """Print the tables and the verdict."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    for title, rows in proof.tables.items():
        table = Table(title=title, title_justify="left", title_style="bold")
        for name in ("compared", "difference", "tolerance", "where it is largest", ""):
            table.add_column(name, overflow="fold")
        for each in rows:
            numbers = (each.note, "") if each.note else (f"{each.difference:.1e}", f"{each.tolerance:.1e}")
            mark = "PASS" if each.passed else "[bold red]FAIL[/]"
            table.add_row(each.what, *numbers, each.where, mark)
        console.print(table)
    print(f"{verdict_of(proof)} ({math.ceil(proof.seconds)} s)")


def verdict_of(proof: Proof) -> str:
    """Return the verdict in a sentence."""
    if proof.lost:
        return f"FAIL: {proof.lost}"
    if proof.passed:
        return "PASS: this layout trains the same model as one process"
    failed = [each.what for rows in proof.tables.values() for each in rows if not each.passed]
    return f"FAIL: {proof.first or 'these differ: ' + ', '.join(failed)}"


def command() -> None:
    """Run as the older command megazero-verify."""
    sys.exit(main(sys.argv[1:]))
