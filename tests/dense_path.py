"""The functions of the engine that a dense model needs: no experts, context parallelism, Muon, offload or recompute.

    python -m tests.dense_path    # lines per module: of the functions that ran, and of the whole module

Four ranks train it with pipeline, tensor and data parallelism, ZeRO 1 to 3 and sequence parallelism, under a profiler.
"""

import ast
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

import megazero.engine
from tests.helpers.programs import PRELOADED
from tests.helpers.ranks import Forked, Ranks
from tests.parallel.cases import Case, train

ENGINE = Path(megazero.engine.__file__).parent
CASES = (
    Case(pp=2, dp=2, zero=1, micro_batches=3),
    Case(pp=2, tp=2, precision="bf16"),
    Case(dp=2, tp=2, zero=2, micro_batches=3, sp=True),
    Case(dp=4, zero=3, micro_batches=3),
)

Function = tuple[str, int]  # file, first line


def functions_run(rank: int, case: Case) -> set[Function]:
    """Train as a rank of `case`; return the functions of the engine that ran."""
    found: set[Function] = set()

    def record(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(ENGINE)):
            found.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

    threading.setprofile(record)
    sys.setprofile(record)
    try:
        train(rank, case, steps=2)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return found


def lines_run(functions: Iterable[Function]) -> dict[Path, int]:
    """Return the lines of these functions, per module; those of a nested function count once."""
    starts: defaultdict[str, set[int]] = defaultdict(set)
    for file, line in functions:
        starts[file].add(line)
    found = {}
    for file, lines in starts.items():
        ran: set[int] = set()
        for node in ast.walk(ast.parse(Path(file).read_text())):
            if isinstance(node, ast.FunctionDef):
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                if first in lines:
                    ran.update(range(first, (node.end_lineno or first) + 1))
        if ran:
            found[Path(file)] = len(ran)
    return found


def dense_path() -> dict[Path, int]:
    """Return the lines that CASES run, per module of the engine, in processes that have computed nothing before."""
    ranks = Ranks(4, Forked(PRELOADED))
    try:
        return lines_run(set[Function]().union(*(each for case in CASES for each in ranks.run(functions_run, case))))
    finally:
        ranks.stop()


def main() -> None:
    found = dense_path()
    for path, lines in sorted(found.items(), key=lambda row: -row[1]):
        print(f"{lines:5} of {len(path.read_text().splitlines()):4}  {path.relative_to(ENGINE)}")
    everything = sum(len(path.read_text().splitlines()) for path in ENGINE.rglob("*.py"))
    print(f"{sum(found.values()):5} of {everything}  in {len(found)} modules")


if __name__ == "__main__":
    main()
