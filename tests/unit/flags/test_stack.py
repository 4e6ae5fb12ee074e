"""A configuration as layers: which value holds, where it is from, and which flags count as given."""

from pathlib import Path

import pytest

from megazero.command.pretrain import pretrain
from megazero.flags.cli import Command, read
from megazero.flags.flag_names import value_of
from megazero.flags.stack import Stack, Standing
from tests.helpers.table import for_each

PRESET = """
architecture = "mistral"
num-layers = 3
lr = 1e-3
lr-decay-style = "cosine"
lr-warmup-iters = 60
train-iters = 500
save-interval = 7
zero-stage = 2
recompute = "full"
"""


@pytest.fixture
def preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "run.toml").write_text(PRESET)
    monkeypatch.chdir(tmp_path)
    return "run.toml"


def table_of(command: Command) -> dict[str, tuple[str, str]]:
    """Return flag -> (value, source) of the table that --show-options prints."""
    rows = [line.split("  ", 1) for line in command.stack.table().splitlines()]
    words = [(flag.split(" ", 1), source.strip()) for flag, source in rows]
    return {flag: (value[0] if value else "", source) for (flag, *value), source in words}


def test_each_value_has_the_source_that_decides_it(preset: str) -> None:
    """Every kind of layer at once; a table written by hand."""
    command = read(f"--preset {preset} --num-layers 5 --lr 2e-3 --train-tokens 40000 --seq-length 10 --bf16".split())
    of_preset = f"--preset {preset}"
    assert table_of(command) == {
        "--architecture": ("mistral", of_preset),
        "--untie-embeddings": ("", "--architecture mistral"),
        "--rotary-base": ("1000000.0", "--architecture mistral"),
        "--norm": ("rmsnorm", "--architecture mistral"),
        "--activation": ("swiglu", "--architecture mistral"),
        "--linear-biases": ("", "--architecture mistral"),
        "--no-fused-qkv": ("", "--architecture mistral"),
        "--no-learned-positions": ("", "--architecture mistral"),
        "--num-layers": ("5", "the command line"),
        "--seq-length": ("10", "the command line"),
        "--precision": ("bf16", "the command line"),
        "--train-tokens": ("40000", "the command line"),
        "--train-iters": ("4000", "--train-tokens"),
        "--lr": ("0.002", "the command line"),
        "--lr-decay-style": ("cosine", of_preset),
        "--lr-warmup-iters": ("60", of_preset),
        "--zero-stage": ("2", of_preset),
        "--recompute": ("full", of_preset),
        "--preset": (preset, "the command line"),
    }


@for_each(
    ("words", "flag", "value", "source", "given"),
    [
        ("--train-iters 20", "lr-warmup-iters", 2, "because --train-iters is 20", True),
        ("", "save-interval", 0, "because it needs --save DIR", True),
        ("--save-interval 9 --save s", "save-interval", 9, "the command line", True),
        ("--layout auto --global-batch-size 8", "zero-stage", 1, "", False),
        ("--layout auto --global-batch-size 8 --zero-stage 3", "zero-stage", 3, "the command line", True),
        ("--train-tokens 10240", "train-iters", 10, "--train-tokens", False),
        ("--train-tokens 0", "train-iters", 500, "--preset run.toml", True),
        ("--recipe auto", "lr", 3e-4, "", False),
        ("--elastic 1:2 --save s --global-batch-size 8", "layout", "auto", "--elastic", False),
    ],
)
def test_values_that_follow_from_others(
    preset: str, words: str, flag: str, value: object, source: str, given: bool
) -> None:
    command = read(["--preset", preset, *words.split()])
    layer = command.stack.sources.get(flag)
    assert value_of(command.config, flag) == value
    assert source in (layer.source if layer else "") and bool(layer) == bool(source)
    assert (flag in command.given) == given


def test_a_layer_undoes_those_below_it_and_its_own_values_stand() -> None:
    stack = Stack().over("a", {"lr": 1.0, "seed": 5}, Standing.GIVEN).over("b", {"lr": 2.0}, undone=("lr", "seed"))
    assert (value_of(stack.config, "lr"), value_of(stack.config, "seed")) == (2.0, 1234)
    assert stack.given == frozenset() and stack.undone_by("b") == {"lr", "seed"}
    derived = stack.over("the GPU", {"lr": 3.0}, Standing.DERIVED)
    assert value_of(derived.config, "lr") == 3.0 and derived.asked.config == stack.config
    resolved = stack.over("x", {"lr": 9.0}).config
    assert stack.table(resolved) == "--lr 9.0  derived for this run (b: 2.0)"


def test_a_command_prints_its_options_and_trains_nothing(preset: str, capsys: pytest.CaptureFixture[str]) -> None:
    pretrain(["--preset", preset, "--train-iters", "20", "--mock-data", "--save", "s", "--show-options"])
    rows = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines() if "  " in line)
    assert rows["--lr-warmup-iters 2"].strip() == "--preset run.toml, because --train-iters is 20"
    assert rows["--mock-data"].strip() == "the command line" and not Path("s").exists()
