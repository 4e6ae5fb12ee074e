"""Values of a preset give way to the command line; a value that the command line gives is refused as before."""

import shlex
from pathlib import Path

import pytest

from megazero.flags.cli import Command, read
from megazero.flags.flag_names import value_of
from megazero.flags.validate import check_values

# A preset that has every kind of value that gives way.
PRESET = """
num-layers = 2
hidden-size = 64
num-attention-heads = 4
train-iters = 300
lr = 1e-3
min-lr = 1e-4
lr-decay-style = "cosine"
lr-warmup-iters = 30
grad-dtype = "bf16"
recompute = "full"
tensor-model-parallel-size = 2
partition-activations = true
data-path = ["a"]
"""
WSD = PRESET.replace('"cosine"', '"wsd"\nlr-wsd-decay-iters = 60')
SAVING = PRESET + "save-interval = 10\nkeep-last = 2\nkeep-every = 50\nwandb-project = 'p'\n"
# (preset, command line, changed flags with the values that they have then, reason in the last note)
GIVES_WAY = [
    (PRESET, "", {"lr-warmup-iters": 30, "min-lr": 1e-4}, ""),
    (PRESET, "--train-iters 3", {"lr-warmup-iters": 0}, "--train-iters is 3"),
    (PRESET, "--train-iters 30", {"lr-warmup-iters": 3}, "--train-iters is 30"),
    (PRESET, "--train-iters 31", {"lr-warmup-iters": 30}, ""),
    (PRESET, "--load a --train-iters 27", {"lr-warmup-iters": 2}, "--train-iters is 27"),
    (PRESET, "--lr-decay-iters 20", {"lr-warmup-iters": 2}, "--lr-decay-iters is 20"),
    (PRESET, "--train-iters 3 --lr-decay-style constant", {"lr-warmup-iters": 30}, ""),
    (WSD, "--train-iters 80", {"lr-warmup-iters": 8, "lr-wsd-decay-iters": 60}, "--train-iters is 80"),
    (WSD, "--train-iters 20", {"lr-warmup-iters": 2, "lr-wsd-decay-iters": 2}, "--train-iters is 20"),
    (WSD, "--train-iters 1", {"lr-warmup-iters": 0, "lr-wsd-decay-iters": 1}, "--train-iters is 1"),
    (WSD, "--train-iters 9 --lr-warmup-iters 8", {"lr-wsd-decay-iters": 1}, "--train-iters is 9"),
    (WSD, "--lr-decay-style linear", {"lr-wsd-decay-iters": 0}, "--lr-decay-style is linear"),
    (PRESET, "--lr 1e-5", {"min-lr": 1e-6}, "--lr is 1e-05"),
    (SAVING, "", {"save-interval": 0, "keep-last": 0, "keep-every": 0, "wandb-project": ""}, "it needs --log-dir DIR"),
    (SAVING, "--save a", {"save-interval": 10, "keep-last": 2, "keep-every": 50}, "it needs --log-dir DIR"),
    (SAVING, "--save a --log-dir b", {"save-interval": 10, "keep-last": 2, "wandb-project": "p"}, ""),
    (SAVING, "--save a --log-dir b --save-interval-minutes 5", {"save-interval": 0}, "--save-interval-minutes is 5"),
    (PRESET + "save-interval-minutes = 5\n", "--save a --save-interval 7", {"save-interval-minutes": 30.0},
     "--save-interval is 7"),
    (PRESET, "--recompute none", {"partition-activations": False}, "it needs --recompute full"),
    (PRESET, "--tensor-model-parallel-size 1", {"partition-activations": False}, "--tensor-model-parallel-size is 1"),
    (PRESET + "sequence-parallel = true\n",
     "--no-partition-activations --tensor-model-parallel-size 1", {"sequence-parallel": False},
     "--tensor-model-parallel-size is 1"),
    (PRESET, "--precision fp64", {"grad-dtype": "fp32"}, "--precision is fp64"),
    (PRESET, "--mock-data", {"data-path": ()}, "there is --mock-data"),
    (PRESET.replace('data-path = ["a"]', "mock-data = true"), "--data-path b",
     {"mock-data": False, "data-path": ("b",)}, "there is --data-path"),
    (PRESET.replace('data-path = ["a"]', "data-args-path = 'b'"), "--mock-data", {"data-args-path": ""},
     "there is --mock-data"),
    (PRESET + "profile-iterations = '10:20'\n", "--log-dir b --train-iters 15", {"profile-iterations": ""},
     "--train-iters is 15"),
]  # fmt: skip
# (preset, command line, refusal): the same values on the command line, and presets that are wrong by themselves
REFUSED = [
    (PRESET, "--train-iters 3 --lr-warmup-iters 30", "--lr-warmup-iters 30 is not less than --lr-decay-iters 3"),
    (
        WSD,
        "--train-iters 9 --lr-warmup-iters 0 --lr-wsd-decay-iters 10",
        "--lr-warmup-iters 0 and --lr-wsd-decay-iters",
    ),
    (WSD, "--lr-decay-style linear --lr-wsd-decay-iters 3", "--lr-wsd-decay-iters 3 and --lr-decay-style linear"),
    (PRESET, "--lr 1e-5 --min-lr 1e-4", "--min-lr 0.0001 is more than --lr 1e-05"),
    (SAVING, "--keep-last 3", "--keep-last 3 needs --save DIR"),
    (SAVING, "--save-interval 3", "--save-interval 3 needs --save DIR"),
    (PRESET, "--recompute none --partition-activations", "--partition-activations needs --recompute full"),
    (PRESET, "--precision fp64 --grad-dtype bf16", "--grad-dtype bf16: with --precision fp64"),
    (PRESET, "--mock-data --data-path b", "--mock-data with --data-path b"),
    (PRESET + "eval-only = true\n", "", "--eval-only needs --load DIR"),
    (PRESET + "finetune = true\n", "--save a", "--finetune needs --load DIR"),
    (PRESET + "optimizer-nvme-offload = 'n'\n", "", "--optimizer-nvme-offload n needs --optimizer-cpu-offload"),
    (PRESET, "--train-iters 0", "--train-iters 0: must be at least 1"),
]


def command(folder: Path, preset: str, line: str) -> Command:
    (folder / "p.toml").write_text(preset)
    return read(["--preset", str(folder / "p.toml"), *shlex.split(line)])


def test_a_preset_gives_way(tmp_path: Path) -> None:
    for preset, line, values, reason in GIVES_WAY:
        given = command(tmp_path, preset, line)
        check_values(given.config)
        assert {name: value_of(given.config, name) for name in values} == values, line
        assert bool(given.notes) == bool(reason), (line, given.notes)
        if reason:
            assert given.notes[-1].startswith(f"--preset {tmp_path}/p.toml: --"), line
            assert given.notes[-1].endswith(f", because {reason}"), (line, given.notes)


def test_a_note_names_both_values(tmp_path: Path) -> None:
    for line, words in (
        ("--train-iters 3", "--lr-warmup-iters 30 becomes --lr-warmup-iters 0, because --train-iters is 3"),
        ("--recompute none", "--partition-activations becomes --no-partition-activations, because it needs"),
    ):
        (note,) = command(tmp_path, PRESET, line).notes
        assert words in note


def test_the_command_line_does_not(tmp_path: Path) -> None:
    for preset, line, refusal in REFUSED:
        with pytest.raises(ValueError) as refused:
            check_values(command(tmp_path, preset, line).config)
        assert str(refused.value).startswith(refusal), (line, refused.value)


LAYOUT = "pipeline-model-parallel-size = 2\ntensor-model-parallel-size = 2\nzero-stage = 2\nlr = 0.5\n"
EVALUATION = "--eval-only --load a"


def test_an_evaluation_has_no_layout_of_a_preset_that_its_ranks_do_not_fit(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(LAYOUT)
    both = {"pipeline-model-parallel-size", "tensor-model-parallel-size"}
    for line, ranks, kept in (
        (EVALUATION, 1, {}),
        (EVALUATION, 2, {}),
        (EVALUATION, 4, dict.fromkeys(both, 2)),
        (EVALUATION + " --pipeline-model-parallel-size 2", 2, {"pipeline-model-parallel-size": 2}),
        (EVALUATION + " --pipeline-model-parallel-size 2", 3, dict.fromkeys(both, 2)),  # refused, as without a preset
        ("--load a", 1, dict.fromkeys(both, 2)),
    ):
        found = read(["--preset", str(tmp_path / "p.toml"), *line.split()], lambda count=ranks: count)
        assert {name: value for name in both if (value := value_of(found.config, name)) > 1} == kept, (line, ranks)
        dropped = found.config.zero.zero_stage != 2
        assert dropped == (kept != dict.fromkeys(both, 2)) == bool(found.notes) and found.config.optimizer.lr == 0.5
        assert not dropped or f"--eval-only on {ranks} rank" in found.notes[0]
    for ranks_of, kept_by in (("--plan", 1), ("--plan --world-size 4", 2), ("--rehearse 4:0", 2), ("--rehearse 3", 1)):
        line = ["--preset", str(tmp_path / "p.toml"), *EVALUATION.split(), *ranks_of.split()]
        found = read(line, lambda started=4 // kept_by**2: started)  # the ranks that were started do not count
        assert value_of(found.config, "tensor-model-parallel-size") == kept_by, ranks_of


def test_the_record_of_a_run_makes_the_same_run_again(tmp_path: Path) -> None:
    """config.toml has the values with which the run trained."""
    first = command(tmp_path, SAVING, "--train-iters 3 --lr 1e-5")
    again = command(tmp_path, first.to_toml(first.config), "")
    assert again.config == first.config and again.notes == []
