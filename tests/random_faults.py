"""Random single-token faults under megazero verify: `python -m tests.random_faults --seed 0 --faults 60`.

The tokens are those of functions of the engine that dense models run in `LINES`, which all pass without a fault. A
fault is planted in all processes, and verified by the first two lines that run its function. Prints each fault, and
whether megazero verify fails. A fault that it misses may change no result: read it.
"""

import argparse
import ast
import functools
import gc
import importlib
import io
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import tokenize
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megazero.cluster import local
from megazero.log import log
from megazero.verify import verification
from megazero.verify.command import verdict_of
from megazero.verify.verification import Verification, Wanted

ROOT = Path(__file__).parents[1]
ENGINE = ROOT / "megazero" / "engine"
PARTS = ("plan", "zero", "step", "optim", "activations", "mesh", "model", "kernels", "memory")
TOKENS = {"+": "-", "-": "+", "*": "+", "//": "*", "/": "*", "%": "+", "<": "<=", "<=": "<", ">": ">=", ">=": ">"}
TOKENS |= {"==": "!=", "!=": "==", "+=": "-=", "-=": "+=", "*=": "+=", "and": "or", "or": "and", "not": ""}
TOKENS |= {"True": "False", "False": "True", "min": "max", "max": "min", "any": "all", "all": "any", "in": "not in"}
TOKENS |= {"&": "|", "|": "&", "break": "continue", "continue": "break"}
SECONDS = 100  # in which a rank must answer

SMALL = "--num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --vocab-size 301 --init-method-std 0.1"
LINES = [
    Wanted(
        f"{SMALL} --precision bf16 --zero-stage 2 --global-batch-size 7 --micro-batch-size 2 --clip-grad 0.1 "
        "--lr-decay-style cosine --lr-warmup-iters 1 --hidden-dropout 0.1 --attention-dropout 0.1".split(),
        2, then="--zero-stage 1 --tensor-model-parallel-size 2",
    ),
    Wanted(
        f"{SMALL} --precision fp64 --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel "
        "--pipeline-schedule zero-bubble --recompute selective --global-batch-size 4 --hidden-dropout 0.1".split(),
        4, then="--pipeline-schedule 1f1b --tensor-model-parallel-size 1 --no-sequence-parallel --zero-stage 3",
    ),
    Wanted(
        f"{SMALL} --precision fp64 --architecture llama --tensor-model-parallel-size 2 --zero-stage 3 --recompute full "
        "--partition-activations --loss-chunk-tokens 7 --global-batch-size 8 --reset-attention-mask".split(),
        4, then="--pipeline-model-parallel-size 2 --zero-stage 0 --recompute none --no-partition-activations",
    ),
]  # fmt: skip

CACHED = type(functools.cache(str))


class Place(NamedTuple):
    """A token of a function at the level of a module or of a class."""

    file: str  # below ENGINE
    function: str  # qualified
    start: tuple[int, int]  # line and column
    old: str
    new: str

    def __str__(self) -> str:
        line = (ENGINE / self.file).read_text().splitlines()[self.start[0] - 1]
        return f"{self.file}:{self.start[0]} {self.function}: {self.old} -> {self.new or 'nothing'}: {line.strip()}"

    def planted(self) -> str:
        """Return the source of the file with the fault."""
        lines = (ENGINE / self.file).read_text().splitlines(keepends=True)
        row, column = self.start[0] - 1, self.start[1]
        assert lines[row][column:].startswith(self.old)
        lines[row] = lines[row][:column] + self.new + lines[row][column + len(self.old) :]
        return "".join(lines)


def other(token: tokenize.TokenInfo) -> str | None:
    """Return the text to plant instead of a token; None: it stays."""
    if token.type == tokenize.NUMBER and token.string.isdecimal():
        return str(int(token.string) + 1)
    return TOKENS.get(token.string)


def places(file: Path) -> Iterator[Place]:
    """Yield the faults of a module: not in messages, assertions, annotations or decorators."""
    text, name = file.read_text(), file.relative_to(ENGINE).as_posix()
    tree = ast.parse(text)
    kept: list[ast.AST] = [n for n in ast.walk(tree) if isinstance(n, ast.Raise | ast.Assert | ast.JoinedStr)]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            kept += [*node.decorator_list, *([node.returns] if node.returns else [])]
        elif isinstance(node, ast.arg | ast.AnnAssign) and node.annotation:
            kept.append(node.annotation)
    spans = [((n.lineno, n.col_offset), (n.end_lineno, n.end_col_offset)) for n in kept]
    functions = {}
    for node in tree.body:
        inner = [(f"{node.name}.", f) for f in node.body] if isinstance(node, ast.ClassDef) else [("", node)]
        functions |= {prefix + f.name: f for prefix, f in inner if isinstance(f, ast.FunctionDef)}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        new = other(token)
        owners = [q for q, f in functions.items() if f.body[0].lineno <= token.start[0] <= f.end_lineno]
        if new is None or not owners or any(a <= token.start < b for a, b in spans):
            continue
        place = Place(name, owners[0], token.start, token.string, new)
        try:
            compile(place.planted(), name, "exec")
        except SyntaxError:
            continue
        yield place


# -- planting


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from codes(each)


def replace(place: Place, source: str) -> None:
    """Give all functions of the place's name the code of `source`, wherever they were imported."""
    file = str(ENGINE / place.file)
    importlib.import_module("megazero.engine." + place.file.removesuffix(".py").replace("/", "."))
    (new, *_) = [each for each in codes(compile(source, file, "exec")) if each.co_qualname == place.function]
    for each in gc.get_objects():
        if type(each) is types.FunctionType and each.__code__.co_filename == file:
            if each.__code__.co_qualname == place.function:
                each.__code__ = new
    for each in gc.get_objects():
        if type(each) is CACHED:
            each.cache_clear()


def plant(place: Place) -> None:
    replace(place, place.planted())


# -- which functions run


def trace(path: str) -> None:
    """Write the file and name of each function of the engine that runs in this process."""
    found: set[types.CodeType] = set()
    out = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def see(frame: types.FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if code not in found:
            found.add(code)
            if code.co_filename.startswith(f"{ENGINE}/"):
                os.write(out, f"{code.co_filename[len(str(ENGINE)) + 1 :]} {code.co_qualname}\n".encode())

    threading.setprofile(see)
    sys.setprofile(see)


def functions_of(wanted: Wanted) -> set[tuple[str, str]]:
    """Return the functions that ranks run; raise RuntimeError if the line does not pass."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/functions"
        proof = Verification(wanted, functools.partial(trace, path)).run()
        if not proof.passed:
            raise RuntimeError(f"{' '.join(wanted.flags)}: {verdict_of(proof)}")
        lines = Path(path).read_text().splitlines()
    return {(file, name.split(".<locals>")[0]) for file, name in (line.split(" ", 1) for line in lines)}


def result(place: Place, wanted: Wanted) -> str:
    """Return how megazero verify fails with a fault; empty: it passes."""

    def late(*_: Any) -> None:
        raise TimeoutError("no end")

    plant(place)
    signal.signal(signal.SIGALRM, late)
    signal.alarm(4 * SECONDS)
    try:
        proof = Verification(wanted, functools.partial(plant, place)).run()
        return "" if proof.passed else f"{'stops' if proof.lost else 'differs'}: {verdict_of(proof)[6:150]}"
    except Exception as error:
        return f"stops: {type(error).__name__}: {str(error)[:100]}"
    finally:
        signal.alarm(0)
        replace(place, (ENGINE / place.file).read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--from", dest="first", type=int, default=0, help="number of the first fault that is planted")
    options = parser.parse_args()
    log.setLevel(logging.WARNING)
    local.preload(["megazero.verify.training"])
    verification.SECONDS = SECONDS
    run = [functions_of(wanted) for wanted in LINES]
    files = sorted(path for part in PARTS for path in (ENGINE / part).rglob("*.py"))
    every = [p for file in files for p in places(file) if any((p.file, p.function) in each for each in run)]
    print(f"{len(every)} faults in {len({(p.file, p.function) for p in every})} functions", flush=True)
    found = Counter[str]()
    for number, place in enumerate(random.Random(options.seed).sample(every, options.faults)[options.first :]):
        lines = [wanted for wanted, ran in zip(LINES, run, strict=True) if (place.file, place.function) in ran]
        words = next(filter(None, (result(place, wanted) for wanted in lines[:2])), "MISSED")
        found[words.split(":")[0]] += 1
        print(f"{options.first + number:3} {words}\n      {place}", flush=True)
    print(", ".join(f"{number} {words}" for words, number in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
