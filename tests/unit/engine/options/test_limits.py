"""Senseless command lines: each is refused by one sentence that names flag, value and way out, after little work.

Work is counted in lines of Python run, not in seconds: a loop over a billion candidates fails on any machine.
"""

import contextlib
import io
import random
import re
import sys
import typing
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Literal

import pytest

from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.topology import Layout
from megazero.flags.cli import parse
from megazero.flags.config import Config
from megazero.flags.flag_names import flags
from megazero.flags.limit_checks import MAX_NAME, MAX_TEXT, divisors, out_of_range
from megazero.flags.resolve import resolve
from megazero.host import Available, Machine
from megazero.planner.bytes.capacity import check_memory
from tests.helpers.programs import warm
from tests.helpers.table import for_each

MAX_LINES = 40_000_000  # an estimate of 4096 layers takes 10,000,000; a loop over a billion candidates never ends
HOST = Machine(range(1), "cpu", None, Available(8 << 30, "of host memory"))
NUMBERS = {
    int: ["0", "-1", "7", "1000000007", "1000000000001", "9" * 4000],
    float: ["0", "-1", "1e300", "-1e300", "nan", "inf", "1e-300", "9" * 400],
}
UNREADABLE = ["0x10", "1e3", "\uff11", "\u00bd", "9" * 5000, "", " ", "\udcff"]  # by one kind of number or by both
WORDS = [
    "",
    "\0",
    "a\0b",
    "\udcff",
    "x" * 300,
    "y" * 5000,
    "*",
    "[",
    "../" * 2000,
    "-",
    "--",
    "b/" + "é" * 130,
    "1e300",
]


PARSER = "parser: "  # before the output of the command-line parser itself


class TooMuchWork(Exception):
    """More than MAX_LINES lines of Python were run."""


@contextlib.contextmanager
def limited_work(max_lines: int = MAX_LINES) -> Iterator[list[int]]:
    """Raise TooMuchWork if the block runs more lines than that; yields the count."""
    count = [0]

    def trace(frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        count[0] += event == "line"
        if count[0] > max_lines:
            raise TooMuchWork(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


def start(argv: list[str], world_size: int, vocab_size: int = 257) -> tuple[Config, Layout] | str:
    """Return the configuration that a run starts with, or its refusal, by the steps of pretrain_gpt.py."""
    import torch._dynamo  # noqa: F401 - a million lines, which do not count

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            config = parse(argv)
    except SystemExit as stop:
        assert stop.code == 2, argv
        return PARSER + said.getvalue()
    except ValueError as error:
        return str(error)
    with limited_work():
        try:
            config, layout = resolve(config, world_size, vocab_size, declare)
            check_memory(config, layout, 0, HOST)
        except ValueError as error:
            return str(error)
    return config, layout


def one_sentence(said: str) -> bool:
    """Return whether a refusal is one line that names a flag of the command line or one that it goes with."""
    first = said.split()[0]
    known = [*flags(), "preset", "hf-config"]
    return first.startswith("--") and "\n" not in said and len(said) < 1000 and first[2:].rstrip(":") in known


def senseless_value(rng: random.Random, flag: str) -> list[str]:
    kind = flags()[flag][1]
    if typing.get_origin(kind) is Literal:
        return [rng.choice(["", "fp8", *map(str, typing.get_args(kind) * 9)])]
    if kind is bool:
        return []
    if kind in (int, float):
        edge = flags()[flag].bounds
        if rng.random() < 0.05:
            return [rng.choice(UNREADABLE)]
        return [rng.choice([*NUMBERS[kind], str(edge.most), str(edge.least), repr(kind(edge.most) * 2 + 1)])]
    return [rng.choice(WORDS)] if kind is str else rng.choices(WORDS, k=rng.randrange(4))


@pytest.mark.long
def test_senseless_command_lines_are_refused_or_run() -> None:
    """No other exception than a refusal, no endless loop; an accepted config is wholly in range."""
    rng, refused = random.Random(8), 0
    for _ in range(40):
        argv = []
        for flag in rng.sample(sorted(flags()), rng.randrange(1, 5)):
            argv += [f"--{flag}", *senseless_value(rng, flag)]
        result = start(argv, rng.choice([1, 2, 6, 8, 1000]))
        if isinstance(result, str):
            refused += 1
            assert result.startswith(PARSER) or all(map(one_sentence, result.splitlines())), (argv, result)
    assert refused > 25, "hardly any of these command lines makes sense"


def test_every_number_has_a_range() -> None:
    for name, flag in flags().items():
        assert (flag.bounds is not None) == (flag.kind in (int, float)), name
        assert flag.bounds is None or flag.bounds.why, f"{name}: an upper bound says why"


@for_each("flag", sorted(name for name, flag in flags().items() if flag.bounds))
def test_both_ends_of_a_range_hold(flag: str) -> None:
    bounds, kind = flags()[flag].bounds, flags()[flag].kind
    assert out_of_range(bounds.least, bounds) == "" or bounds.least_open
    assert out_of_range(bounds.most, bounds) == "" or bounds.most_open
    past = bounds.most if bounds.most_open else kind(bounds.most) * 2 + 1
    for value in (past, kind(bounds.least) - 1):
        result = start([f"--{flag}={value}"], 1)
        assert isinstance(result, str) and result.startswith(f"--{flag} {kind(value)}: must "), result


EXPLICIT = [
    ("--hidden-size 1000000000001", 1, "--hidden-size 1000000000001: must be at most"),
    ("--hidden-size 1000000000 --num-attention-heads 3", 1, "--hidden-size 1000000000: must be at most"),
    ("--hidden-size 1048575 --num-attention-heads 8", 1, "--hidden-size 1048575 is not .* use 5 heads"),
    ("--ffn-hidden-size 10000000001 --tensor-model-parallel-size 2", 2, "--ffn-hidden-size 10000000001: must"),
    (
        "--ffn-hidden-size 8388607 --tensor-model-parallel-size 2",
        2,
        "--ffn-hidden-size 8388607 is .* use .* of 1, or",
    ),
    ("--num-layers 1000000000", 1, "--num-layers 1000000000: must be at most 4096"),
    ("--num-layers 4096", 1, r"--num-layers 4096 .* needs at least [\d.]+ GB .* at most --num-layers \d+"),
    (
        "--global-batch-size 1000000000",
        1,
        "--global-batch-size 1000000000 is 1000000000 micro-batches .*; use at most 10922",
    ),
    ("--micro-batch-size 1000000", 1, "--micro-batch-size 1000000 --seq-length 1024 .* needs at least [0-9.]+ TB"),
    ("--seq-length 16777216", 1, "--micro-batch-size 1 --seq-length 16777216 .* needs at least [0-9.]+ [GT]B"),
    ("--vocab-size 2147483647", 1, ".* --vocab-size 2147483647 .* needs at least [0-9.]+ TB"),
    (
        "--zero-shard-size 7",
        999_983,
        "--zero-shard-size 7 does not divide the 999983 data-parallel ranks; use 999983, or 0",
    ),
    ("--freeze-parameters *", 1, r"--freeze-parameters \*: matches all 148 parameters.*match fewer"),
    ("--freeze-parameters *.weight *.bias", 1, r"--freeze-parameters \*.weight \*.bias: matches all"),
    ("--freeze-parameters blocs.0.*", 1, r"--freeze-parameters blocs.0.\*: matches no parameter; .* like blocks.0"),
    ("--freeze-parameters head.* nothing", 1, "--freeze-parameters nothing: matches no parameter"),
    ("--lr 1e300", 1, r"--lr 1e\+300: must be at most 10"),
    ("--lr 2 --weight-decay 1", 1, "--weight-decay 1.0 x --lr 2.0 is more than 1.*lower one"),
    ("--weight-decay 1e300", 1, r"--weight-decay 1e\+300: must be at most"),
    ("--init-method-std 1e300", 1, r"--init-method-std 1e\+300: must be at most"),
    ("--initial-loss-scale 1e300", 1, r"--initial-loss-scale 1e\+300: must be at most"),
    ("--num-workers 1000000000000", 1, "--num-workers 1000000000000: must be at most 64"),
    ("--distributed-timeout-minutes 1e300", 1, r"--distributed-timeout-minutes 1e\+300: must be at most"),
    *((f"--{flag} /tmp/{'x' * 256}", 1, f"--{flag} /tmp/x.*: a name in it has 256 bytes") for flag in ("save", "load")),
    (f"--data-path {'é' * 120}", 1, f"--data-path é.*: a name in it has 240 bytes.* at most {MAX_NAME - 17} bytes"),
    (f"--log-dir {'ab/' * 2000}", 1, f"--log-dir .*: longer than {MAX_TEXT} bytes"),
    (f"--preset {'p' * 300}", 1, "--preset p*.*: a name in it has 300 bytes"),
    ("--save \udcff", 1, r"--save \\udcff is not UTF-8"),
]


@pytest.mark.long
@for_each(("line", "ranks", "said"), EXPLICIT)
def test_a_refusal_names_flag_value_and_way_out(line: str, ranks: int, said: str) -> None:
    result = start(line.split(), ranks)
    assert isinstance(result, str) and re.match(said, result), result
    assert one_sentence(result)


@pytest.mark.long
def test_the_program_refuses_in_one_line_and_with_exit_code_1() -> None:
    """A user sees no traceback, and nothing on the other stream."""
    done = warm("pretrain_gpt.py", "--vocab-size", 9, "--num-layers", 0)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
    assert done.stderr.startswith("error: --num-layers 0: "), done.stderr


def test_limited_work_sees_an_endless_loop() -> None:
    def endless() -> int:
        return min(n for n in range(1, 10**12) if n * n < 0)

    with pytest.raises(TooMuchWork), limited_work(1000):
        endless()


def test_divisors() -> None:
    assert [divisors(n) for n in (1, 2, 16, 12, 13)] == [[1], [1, 2], [1, 2, 4, 8, 16], [1, 2, 3, 4, 6, 12], [1, 13]]
