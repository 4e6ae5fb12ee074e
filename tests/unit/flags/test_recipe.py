"""--train-tokens, and --recipe auto: its laws, the flags that it keeps, and the run's config.toml."""

import json
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import pretrain_gpt
from megazero.command.follow_recipe import follow_recipe
from megazero.flags.batch_ramp import BatchSizes, batch_sizes
from megazero.flags.cli import Command, read
from megazero.flags.flag_names import value_of, with_values
from megazero.flags.recipe import (
    ModelSize,
    RecipeValue,
    power_lines_decay,
    recipe,
    recipe_words,
    step_law_batch,
    step_law_rate,
)
from megazero.flags.validate import check_values
from megazero.run.run_state import RunState
from tests.helpers.programs import warm
from tests.helpers.table import for_each

MODEL = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --vocab-size 257"
BLOCKS = 2 * (12 * 64 * 64 + 13 * 64)  # matrices of 3 + 1 + 8 times 64 x 64; their biases, and two norms
WHOLE = BLOCKS + 2 * 64 + (257 + 32) * 64  # with the last norm, the token table and positions


def ready(flags: str, *more: Any) -> Command:
    command = follow_recipe(read([*flags.split(), *map(str, more)]))
    check_values(command.config)
    return command


def values(command: Command, *names: str) -> tuple[Any, ...]:
    return tuple(value_of(command.config, name) for name in names)


@for_each(
    ("flags", "iterations"),
    [
        ("--train-tokens 1000 --global-batch-size 4 --seq-length 50", 5),
        ("--train-tokens 1001 --global-batch-size 4 --seq-length 50", 6),
        ("--train-tokens 1 --global-batch-size 4 --seq-length 50", 1),
        ("--train-tokens 1001 --micro-batch-size 2 --seq-length 50", 2),  # eight ranks
        ("--train-tokens 1001 --micro-batch-size 2 --seq-length 50 --tp 2 --pp 2", 6),
        ("--train-tokens 1001 --micro-batch-size 2 --seq-length 50 --plan --world-size 2", 6),
        ("--train-tokens 1001 --micro-batch-size 2 --seq-length 50 --rehearse 4:1", 3),
        ("--train-tokens 7001 --micro-batch-size 2 --seq-length 50 --plan --world-size 210 --tp 2 --pp 3 --cp 5", 11),
        # 1 + 1 + 2 + 2 + 2 + 2 + 2 + 2, then 4
        ("--train-tokens 18 --global-batch-size 4 --rampup-batch-size 1 1 12 --seq-length 1", None),
    ],
)
def test_tokens_are_whole_iterations(flags: str, iterations: int | None) -> None:
    command = read(flags.split(), lambda: 8)
    config = command.config
    found, tokens, seq = config.training.train_iters, config.training.train_tokens, config.model.seq_length
    if iterations is None:
        total = batch_sizes(config).total
        assert total(found) * seq >= tokens > total(found - 1) * seq
        return
    assert found == iterations
    assert f"{iterations:,} iterations" in command.notes[-1] and "rounded up" in command.notes[-1]


@for_each("ramp", [(4, 1, 1, 12), (11, 2, 3, 20), (12, 4, 4, 20), (7, 1, 2, 10), (9, 3, 2, 11), (8, 2, 2, 100), (6,)])
def test_the_samples_of_iterations_are_those_of_each(ramp: tuple[int, ...]) -> None:
    """Also where an iteration begins at a border, and where the border is a fraction of a sample."""
    sizes, consumed = BatchSizes(*ramp), 0
    for iterations in range(60):
        assert sizes.total(iterations) == consumed
        consumed += sizes.at(consumed)


def test_the_command_lines_length_replaces_that_of_a_preset(tmp_path: Path) -> None:
    preset = tmp_path / "run.toml"
    preset.write_text("train-iters = 70\nglobal-batch-size = 2\nseq-length = 8\n")
    command = read(["--preset", str(preset), "--train-tokens", "64"])
    assert values(command, "train-iters", "train-tokens") == (4, 64)
    assert tomllib.loads(command.to_toml(command.config)) == {
        "train-tokens": 64,
        "global-batch-size": 2,
        "seq-length": 8,
    }
    preset.write_text("train-tokens = 64\nglobal-batch-size = 2\nseq-length = 8\n")
    assert values(read(["--preset", str(preset)]), "train-iters") == (4,)
    command = read(["--preset", str(preset), "--train-iters", "5"])
    assert values(command, "train-iters", "train-tokens") == (5, 0)
    assert "train-tokens" not in tomllib.loads(command.to_toml(command.config))


@for_each(
    ("flags", "said"),
    [
        ("--train-tokens 9 --train-iters 3", "^--train-tokens 9 and --train-iters 3: give one of them$"),
        ("--train-tokens 9 --train-iters 3 --recipe auto", "^--train-tokens 9 and --train-iters 3: give one of them$"),
        ("--train-tokens 9 --data-stages a.toml", "^--train-tokens 9 with --data-stages: .* --train-iters instead$"),
        ("--train-tokens 9 --decay-from a/iter_0000001 --decay-iters 3 --save b", "^--train-tokens .*leave out"),
    ],
)
def test_a_length_that_is_given_twice_is_refused(flags: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read(flags.split())


def test_the_laws_are_those_of_their_papers() -> None:
    """The Step Law's own example of 1 B parameters and 100 B tokens; at 20 tokens a parameter the decay is its 0.1."""
    assert step_law_rate(1e9, 1e11) == pytest.approx(1.63e-3, rel=0.01)
    assert step_law_batch(1e11) == pytest.approx(1.11e6, rel=0.01)
    for n in (1e8, 1e9):
        rate, batch = step_law_rate(n, 20 * n), step_law_batch(20 * n)
        assert power_lines_decay(n, 20 * n, batch, rate) == pytest.approx(0.1, rel=0.05)
        assert power_lines_decay(n, 20 * n, 2 * batch, rate) == pytest.approx(0.2, rel=0.05)  # linear in the batch


def test_the_recipe_of_a_model() -> None:
    command = ready(f"{MODEL} --recipe auto")
    tokens = 20 * WHOLE
    batch, iterations, rate, decay = values(command, "global-batch-size", "train-iters", "lr", "weight-decay")
    assert batch % 8 == 0 and abs(batch * 32 - step_law_batch(tokens)) <= 4 * 32
    assert (iterations - 1) * batch * 32 < tokens <= iterations * batch * 32
    assert rate == pytest.approx(step_law_rate(BLOCKS, tokens), rel=0.005)
    assert decay == pytest.approx(power_lines_decay(BLOCKS, tokens, batch * 32, rate), rel=0.005)
    assert values(command, "lr-warmup-iters", "lr-decay-style", "min-lr") == (iterations // 10, "cosine", 1e-5)
    assert values(command, "adam-beta1", "adam-beta2", "recipe", "train-tokens") == (0.9, 0.95, "none", 0)
    lines = command.notes[-1].splitlines()
    assert f"N = {BLOCKS:,} parameters of blocks" in lines[0] and "extrapolated" in lines[0]
    assert all("arXiv:" in line for line in lines[1:]) and len(lines) == 10


def test_the_recipe_of_a_long_run() -> None:
    """31,250 iterations of 4,000 x 32 tokens: a warmup of no tenth, and a last rate of no more than the peak."""
    command = read(f"{MODEL} --recipe auto --train-tokens 4000000000 --global-batch-size 4000 --lr 5e-6".split())
    config, size = command.config, ModelSize(200_000_000, 230_000_000)
    kept = {"train-tokens", "global-batch-size", "lr"}
    chosen = recipe(with_values(config, {"lr-decay-style": "wsd"}), kept | {"lr-decay-style"}, size)
    found = {each.flag: each.value for each in chosen}
    decay = power_lines_decay(200_000_000, 4_000_000_000, 128_000, 5e-6)
    assert found == {
        "global-batch-size": 4000, "train-iters": 31_250, "lr": 5e-6, "min-lr": 5e-6, "lr-warmup-iters": 2000,
        "lr-decay-style": "wsd", "lr-wsd-decay-iters": 3125, "weight-decay": float(f"{decay:.3g}"), "adam-beta1": 0.9,
        "adam-beta2": 0.95,
    }  # fmt: skip
    words = recipe_words(with_values(config, found), chosen, size).splitlines()
    assert words[0] == "--recipe auto: N = 200,000,000 parameters of blocks, D = 4,000,000,000 tokens"
    assert [line.split()[0] for line in words[1:]] == [f"--{flag}" for flag in found]
    tokens = {each.flag: each.value for each in recipe(config, set(), size)}
    assert tokens["train-iters"] * tokens["global-batch-size"] * 32 == pytest.approx(20 * 230_000_000, rel=1e-3)


@for_each(
    ("blocks", "tokens", "fitted"),
    [
        (60_000_000, 2_000_000_000, True),
        (1_100_000_000, 100_000_000_000, True),
        (59_000_000, 3_000_000_000, False),
        (1_110_000_000, 3_000_000_000, False),
        (70_000_000, 1_990_000_000, False),
        (70_000_000, 101_000_000_000, False),
    ],
)
def test_a_recipe_beyond_the_runs_of_its_laws_is_said(blocks: int, tokens: int, fitted: bool) -> None:
    config = read(f"{MODEL} --global-batch-size 1000 --train-iters {tokens // 1000 // 32}".split()).config
    words = recipe_words(config, [RecipeValue("lr", 1.0, "given", True)], ModelSize(blocks, 1))
    assert ("extrapolated" in words) != fitted


def test_it_keeps_the_flags_of_the_command_line_and_not_those_of_a_preset(tmp_path: Path) -> None:
    preset = tmp_path / "run.toml"
    preset.write_text("lr = 7e-4\ntrain-iters = 70\nlr-warmup-iters = 60\nclip-grad = 0.5\n")
    kept = "--global-batch-size 20 --lr 1e-3 --train-tokens 640000 --adam-beta2 0.98 --lr-decay-style wsd"
    command = ready(f"{MODEL} --recipe auto {kept} --preset", preset)
    assert values(command, "global-batch-size", "lr", "train-iters", "adam-beta2") == (20, 1e-3, 1000, 0.98)
    assert values(command, "lr-decay-style", "lr-wsd-decay-iters", "clip-grad") == ("wsd", 100, 0.5)
    decay = power_lines_decay(BLOCKS, 640_000, 640, 1e-3)
    assert values(command, "weight-decay", "lr-warmup-iters") == (float(f"{decay:.3g}"), 100)
    assert "without --train-iters 70 --lr-warmup-iters 60 of --preset" in command.notes[0]
    assert [line.split()[-1] for line in command.notes[-1].splitlines() if "--lr " in line] == ["given"]
    command = ready(f"{MODEL} --recipe auto --global-batch-size 4 --train-iters 50")
    assert values(command, "train-iters", "global-batch-size") == (50, 4)
    assert values(command, "lr")[0] == pytest.approx(step_law_rate(BLOCKS, 50 * 4 * 32), rel=0.005)


def test_a_resume_by_config_toml_needs_no_recipe(tmp_path: Path) -> None:
    command = ready(f"{MODEL} --recipe auto --train-tokens 100000")
    (tmp_path / "config.toml").write_text(command.to_toml(command.config))
    again = read(["--preset", str(tmp_path / "config.toml")])
    given = tomllib.loads((tmp_path / "config.toml").read_text())
    assert {"lr", "train-iters", "weight-decay", "lr-warmup-iters"} <= {*given}
    assert not {"recipe", "train-tokens"} & {*given}
    for group in ("training", "optimizer", "model"):
        assert getattr(again.config, group) == getattr(command.config, group)


def test_muon_has_the_rate_of_adamw() -> None:
    adamw, muon = (ready(f"{MODEL} --recipe auto --optimizer {name}") for name in ("adamw", "muon"))
    assert values(muon, "lr", "weight-decay") == values(adamw, "lr", "weight-decay")
    assert "2502.16982" in muon.notes[-1] and "2502.16982" not in adamw.notes[-1]


@for_each(
    ("flags", "said"),
    [
        ("--optimizer lion", "--recipe auto with --optimizer lion: .* give --lr and --weight-decay"),
        ("--optimizer muon --muon-scale keller --lr 0.02", "--recipe auto with --muon-scale keller: .* use moonlight"),
        ("--train-iters 50", "--recipe auto with --train-iters 50: .* --train-tokens"),
        ("--data-stages a.toml", "--recipe auto with --data-stages: "),
        ("--finetune --load a", "--recipe auto with --finetune: .* give --lr, --lr-warmup-iters and --lr-decay-style"),
    ],
)
def test_a_recipe_without_a_law_is_refused(flags: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        follow_recipe(read([*MODEL.split(), "--recipe", "auto", *flags.split()]))


def test_weights_of_another_run_are_refused_and_a_checkpoint_of_its_own_is_resumed(tmp_path: Path) -> None:
    """A Hugging Face folder, and an imported or merged checkpoint; --eval-only needs no recipe."""
    folder, runs = tmp_path / "published", {}
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for weights_only in (True, False):
        runs[weights_only] = tmp_path / f"run-{weights_only}"
        state = RunState(3, 0, 0, None, {}, {}, {}, weights_only=weights_only)
        (runs[weights_only] / "iter_0000003").mkdir(parents=True)
        (runs[weights_only] / "iter_0000003" / "state.json").write_text(json.dumps(asdict(state)))
    for load in (folder, runs[True], runs[True] / "iter_0000003"):
        with pytest.raises(
            ValueError, match=f"^--recipe auto with --load {load}, .* give --lr, --lr-warmup-iters and "
        ):
            follow_recipe(read([*MODEL.split(), "--recipe", "auto", "--load", str(load)]))
        follow_recipe(read([*MODEL.split(), "--recipe", "auto", "--eval-only", "--load", str(load)]))
    fresh = ready(f"{MODEL} --recipe auto")
    for load in (runs[False], runs[False] / "iter_0000003", tmp_path / "none yet"):
        resumed = ready(f"{MODEL} --recipe auto --load", load)
        assert (resumed.config.training, resumed.config.optimizer) == (fresh.config.training, fresh.config.optimizer)


def test_a_missing_vocabulary_is_left_to_a_later_check() -> None:
    command = read("--num-layers 2 --recipe auto".split())
    assert follow_recipe(command) == command


def test_a_prediction_shows_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    pretrain_gpt.main([*MODEL.split(), "--recipe", "auto", "--plan", "--device-type", "cpu"])
    printed = capsys.readouterr().out
    iterations = values(ready(f"{MODEL} --recipe auto"), "train-iters")[0]
    assert "--recipe auto: N = " in printed and f"--train-iters {iterations}" in printed


@pytest.mark.second
def test_a_recipe_without_data_is_refused_as_any_run() -> None:
    done = warm("pretrain_gpt.py", "--recipe", "auto")
    assert done.returncode == 1 and done.stderr.startswith("error: --data-path is missing")
