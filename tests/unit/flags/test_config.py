"""Flags, presets, defaults, help, and every refusal of `resolve`."""

import contextlib
import dataclasses
import re
import tomllib
import typing
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest

from data_tools import preprocess_data
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.step.optimization import learning_rate
from megazero.families import FAMILIES, with_traits
from megazero.flags import presets as presets_module
from megazero.flags.cli import parse, read
from megazero.flags.config import Config, DataConfig
from megazero.flags.corpus_flags import document_flags, named_corpora
from megazero.flags.flag_names import as_flag, flags, to_toml, value_of, with_values
from megazero.flags.help import FAMILY, default_words, usual_flags
from megazero.flags.presets import read_preset
from megazero.flags.resolve import resolve
from megazero.flags.validate import check_device, check_values
from tests.helpers.table import for_each

# Flags that scripts, users and checks outside this repository rely on.
SURFACE = set(
    """
    num-layers hidden-size ffn-hidden-size num-attention-heads seq-length attention-dropout hidden-dropout
    init-method-std untie-embeddings micro-batch-size global-batch-size train-iters seed precision grad-dtype lr min-lr
    lr-warmup-iters lr-decay-iters lr-decay-style weight-decay adam-beta1 adam-beta2 adam-eps clip-grad
    initial-loss-scale tensor-model-parallel-size pipeline-model-parallel-size virtual-pipeline-stages pipeline-schedule
    zero-stage zero-shard-size reduce-bucket-size recompute partition-activations checkpoint-in-cpu
    contiguous-checkpointing sequence-parallel distributed-timeout-minutes data-path split tokenizer eod-mask-loss
    num-workers eval-interval eval-iters save load save-interval keep-last async-save exit-interval log-dir log-interval
    wandb-project plan world-size device-type rehearse architecture num-query-groups rotary-base norm-epsilon
    kv-channels qk-layernorm
    """.split()
)
# Flags of these that do not exist yet. Remove one from this list when you add it.
COMING: set[str] = set()
# A budget: each flag is one more that a user has to understand, and that has to be tested with all others.
MOST_OPTIONS = 210
OWN = ("preset", "hf_config")  # flags of the parser, which no group has

DEFAULTS = {
    "precision": "fp32",
    "zero-stage": 1,
    "recompute": "none",
    "attention-dropout": 0.0,
    "hidden-dropout": 0.0,
    "grad-dtype": "fp32",
    "lr-warmup-iters": 0,
    "lr-decay-style": "constant",
    "split": "969,30,1",
    "eval-interval": 0,
    "seed": 1234,
    "keep-last": 0,
    "untie-embeddings": False,
    "partition-activations": False,
    "tensor-model-parallel-size": 1,
    "pipeline-model-parallel-size": 1,
}


def make(**options: Any) -> Config:
    """A config from flags, written with underscores."""
    return with_values(Config(), {name.replace("_", "-"): value for name, value in with_traits(options).items()})


# -- flags


def test_the_surface_is_there() -> None:
    assert not COMING - SURFACE
    assert not COMING & set(flags()), "take it out of COMING"
    assert not SURFACE - COMING - set(flags())


def test_the_budget_of_options_is_held() -> None:
    assert len(flags()) <= MOST_OPTIONS


def test_no_two_groups_share_a_flag() -> None:
    groups = [getattr(Config(), f.name) for f in dataclasses.fields(Config) if f.name not in OWN]
    assert sum(len(dataclasses.fields(group)) for group in groups) == len(flags())


def test_defaults() -> None:
    config = parse([])
    assert config == Config()
    assert {flag: value_of(config, flag) for flag in DEFAULTS} == DEFAULTS


def choices_of(kind: Any) -> list[Any]:
    """Return the values of a flag that has few; a list of one for each item of a list."""
    args = typing.get_args(kind)
    if typing.get_origin(kind) is tuple and args[0] is not str and args[0] is not int:
        return [(choice,) for choice in typing.get_args(args[0])]
    return list(args) if typing.get_origin(kind) is Literal else []


def test_every_flag_is_parsed() -> None:
    """Each gets a value that is not its default; all at once, in both spellings."""
    for joined in (False, True):
        argv, expected = [], {}
        for flag, (_, kind, *_) in flags().items():
            default = default_words(flags()[flag]) or value_of(Config(), flag)
            if choices := choices_of(kind):
                expected[flag] = next(choice for choice in choices if choice != default)
            elif kind is bool:
                expected[flag] = True
                argv.append(f"--{flag}")
                continue
            elif flag == "decay-iters":  # with it, a branch sets other flags: tests/unit/run/test_branch.py
                expected[flag] = 0
                continue
            elif flag == "train-tokens":  # in place of --train-iters: tests/unit/flags/test_recipe.py
                expected[flag] = 0
                continue
            else:
                expected[flag] = {int: 7, float: 0.25, str: "word"}.get(kind, ("0.3", "a", "0.7", "b"))
                expected[flag] = (2, 3, 4) if kind == tuple[int, ...] else expected[flag]
            words = list(map(str, expected[flag])) if isinstance(expected[flag], tuple) else [str(expected[flag])]
            argv += [f"--{flag}={words[0]}"] if joined and len(words) == 1 else [f"--{flag}", *words]
        assert expected["activation"] == "auto"
        expected["activation"] = FAMILIES[expected["architecture"]].traits["activation"]
        config = parse(argv)
        assert {flag: value_of(config, flag) for flag in flags()} == expected


def test_the_last_flag_wins() -> None:
    config = parse(
        "--lr 1 --untie-embeddings --lr=2 --data-path a --no-untie-embeddings --lr 3 --data-path 1 b".split()
    )
    assert (config.optimizer.lr, config.model.untie_embeddings, config.data.data_path) == (3.0, False, ("1", "b"))


@for_each(
    ("argv", "said"),
    [
        (["--num-layer", "3"], "Perhaps you meant: --num-layers"),
        (["--tensor-paralel-size", "2"], "--tensor-model-parallel-size"),
        (["--bf17"], "Perhaps you meant: --bf16"),
        (["--learing-rate", "3"], "Perhaps you meant: --lr, --learning_rate"),
        (["--xyzzy"], "--xyzzy: no such flag. --help-all lists"),
        (["--save"], "Missing value for argument '--save'"),
        (["stray"], "stray"),
    ],
)
def test_a_mistyped_flag_is_refused(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(argv)
    assert stopped.value.code == 2
    assert said in unboxed(capsys.readouterr().err)


def unboxed(text: str) -> str:
    """Without tyro's frames and line breaks."""
    return " ".join(re.sub(r"[│─╭╮╰╯]", " ", text).split())


def test_help_names_every_group_flag_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(["--num-layers", "2", "--help-all"])
    assert stopped.value.code == 0
    text = unboxed(capsys.readouterr().out)
    for group in {group for group, *_ in flags().values()}:
        assert f"{group} options" in text
    assert "docs/results/flags.md lists more flags" in text
    for flag in flags():
        if flag in FAMILY:
            assert not re.search(rf" --{flag}(,| [A-Z\[{{])", text), flag
            continue
        entry = re.search(rf" --{flag}(, --no-{flag}| INT| FLOAT| STR| \[STR| \[INT| \{{)(.*)", text)
        assert entry, flag
        default = default_words(flags()[flag]) or value_of(Config(), flag)
        shown = " ".join(default) if isinstance(default, tuple) else repr(default) if default == "" else str(default)
        described = entry[2].split("(default:")[1]  # the first default behind a flag is its own
        assert described.split(")")[0].strip() == shown, flag
    assert "--preset" in text and "--hf-config" in text


def test_flags_of_families_are_valid_without_help(tmp_path: Path) -> None:
    """On the command line and as keys of a preset, which a run's config.toml is too."""
    wanted = {}
    for name in FAMILY:
        kind, default = flags()[name].kind, flags()[name].default
        others = [choice for choice in choices_of(kind) if choice != default]
        wanted[name] = others[0] if others else {bool: not default, int: 7}.get(kind, 0.25)
    argv = [word for name, value in wanted.items() for word in as_flag(name, value).split()]
    preset = tmp_path / "family.toml"
    preset.write_text(to_toml(parse(argv), FAMILY))
    for config in (parse(argv), parse(["--preset", str(preset)])):
        assert {name: value_of(config, name) for name in FAMILY} == wanted
        assert {flags()[name].group for name in FAMILY} == {"model"}


def test_help_breaks_lines_at_its_width_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Each line but the last of a text is full: the first word of the next one would not fit."""
    with pytest.raises(SystemExit):
        parse(["--help-all"])
    pretraining = capsys.readouterr().out
    with pytest.raises(SystemExit):
        preprocess_data.main(["--help"])
    for text, indent in ((pretraining, 8), (capsys.readouterr().out, 23)):
        boxed = [line.replace("│", " ").rstrip() for line in text.splitlines()]
        paired = [
            (a, b) for a, b in pairwise(boxed) if all(each[indent:] and each[:indent].isspace() for each in (a, b))
        ]
        assert len(paired) > 20
        for line, after in paired:
            assert len(line) + 1 + len(after.split()[0]) > 78, (line, after)  # the width of the text
    assert "--precision {fp32,bf16,fp16,fp64}" in pretraining
    assert "(default: fp32 on CPUs; on GPUs bf16, or fp16 if they lack bf16)" in unboxed(pretraining)


def test_help_has_the_flags_of_a_normal_run_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--help"], ["--lr", "1", "-h"]):
        with pytest.raises(SystemExit) as stopped:
            parse(argv)
        assert stopped.value.code == 0
        text = unboxed(capsys.readouterr().out)
        shown = re.findall(r" --([a-z0-9-]+) (?:INT|FLOAT|STR|\[STR|\{)", text.split("The other flags")[0])
        assert shown == [flag for group in usual_flags().values() for flag in group]
        assert len(shown) == 26 and f"--help-all shows {len(flags()) + 2 - len(FAMILY)}." in text
        assert {flag for flag in flags() if not re.search(rf"--{flag}(?![-a-z])", text)} == {*FAMILY}
        assert "(default: 0.0003)" in text and "Peak learning rate." in text


# -- presets


@pytest.fixture
def presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "presets"
    folder.mkdir()
    monkeypatch.setattr(presets_module, "PRESETS", folder)
    (folder / "small.toml").write_text('num-layers = 3\nlr = 1\nprecision = "bf16"\ndata-path = [0.5, "a", "1", "b"]\n')
    (folder / "wide.toml").write_text("hidden-size = 4096\nuntie-embeddings = true\n")
    return folder


def test_a_preset_lies_under_the_flags(presets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(presets.parent.parent)
    relative = f"{presets.parent.name}/presets/small.toml"
    for name in ("small", "small.toml", str(presets / "small.toml"), relative):
        for argv in (["--preset", name, "--num-layers", "5"], ["--num-layers=5", f"--preset={name}"]):
            config = parse(argv)
            assert (config.model.num_layers, config.optimizer.lr) == (5, 1.0)
            assert (config.training.precision, config.data.data_path) == ("bf16", ("0.5", "a", "1", "b"))
            assert config.model.hidden_size == Config().model.hidden_size
            assert config.preset == name


def test_the_last_preset_wins_alone(presets: Path) -> None:
    config = parse(["--preset", "small", "--preset", "wide", "--no-untie-embeddings"])
    assert config.model == dataclasses.replace(Config().model, hidden_size=4096)


def test_an_unknown_preset_is_refused(presets: Path) -> None:
    with pytest.raises(ValueError, match=r"--preset smal: .*nor a preset; did you mean small\?"):
        parse(["--preset", "smal"])
    with pytest.raises(ValueError, match=r"--preset x/y\.toml: no such file"):
        parse(["--preset", "x/y.toml"])


@for_each(
    ("text", "said"),
    [
        ("num-layer = 3", r"unknown key 'num-layer'; did you mean num-layers\?"),
        ("num_layers = 3", r"unknown key 'num_layers'; did you mean num-layers\?"),
        ("xyzzy = 3", r"unknown key 'xyzzy'; see --help"),
        ('preset = "other"', r"unknown key 'preset'"),
        ("[model]\nnum-layers = 3", r"unknown key 'model'"),
        ('num-layers = "3"', r'num-layers = "3": Expected `int`, got `str`'),
        ("num-layers = 3.0", r"num-layers = 3.0: Expected `int`, got `float`"),
        ("num-layers = true", r"num-layers = true: Expected `int`, got `bool`"),
        ('lr = "1"', r'lr = "1": Expected `float`, got `str`'),
        ("lr = true", r"lr = true: Expected `float`, got `bool`"),
        ("save = 1", r"save = 1: Expected `str`, got `int`"),
        ("untie-embeddings = 1", r"untie-embeddings = 1: Expected `bool`, got `int`"),
        ("zero-stage = 4", r"zero-stage = 4: Expected one of 0, 1, 2, 3"),
        ("zero-stage = true", r"zero-stage = true: Expected `int`, got `bool`"),
        ("zero-stage = 1.0", r"zero-stage = 1.0: Expected `int`, got `float`"),
        ('precision = "fp8"', r'precision = "fp8": Expected one of fp32, bf16'),
        ("data-path = [[1]]", r"data-path = \[\[1\]\]: Expected `str`, got `array`"),
        ('data-path = [true, "a"]', r"data-path = .*: Expected `str`, got `bool`"),
        ("num-layers", r"is not a TOML file"),
        ("num-layers = 3\nnum-layers = 4", r"is not a TOML file"),
        ("num-layers = " + "[" * 3000, r"is not a TOML file"),
    ],
)
def test_a_wrong_preset_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"--preset {re.escape(str(path))}:? {said}"):
        read_preset(str(path))


def test_a_preset_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not a TOML file"):
        read_preset(str(path))


def test_to_toml_is_a_preset_of_the_same_run(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    odd = make(
        lr=1e22,
        min_lr=1e-30,
        adam_eps=0.1 + 0.2,
        seed=-5,
        untie_embeddings=True,
        zero_stage=3,
        data_path=("0.5", "a b", "1e-3", 'c"d'),
        save='a"b\\c\n\t\x7f é \U0001f40d',
        tokenizer="-dash",
        log_dir="--lr=7",
    )
    for config in (Config(), odd):
        path.write_text(to_toml(config), encoding="utf-8")
        assert dataclasses.replace(parse(["--preset", str(path)]), preset="") == config
    resolved = resolve(make(num_layers=4, micro_batch_size=2), 3, 50257, declare)[0]
    path.write_text(to_toml(resolved))
    assert resolve(parse(["--preset", str(path)]), 3, 50257, declare)[0] == dataclasses.replace(
        resolved, preset=str(path)
    )


def test_config_toml_holds_what_was_given(tmp_path: Path) -> None:
    """Derived values follow the flags of the next run: the ffn size, the end of the decay, the batch."""
    argv = "--hidden-size 96 --tp 2 --train-iters 10 --lr-decay-style cosine --no-overlap-comm --lr 1 --data-path 1 a"
    command = read(argv.split())
    text = command.to_toml(resolve(command.config, 4, 257, declare)[0])
    given = "hidden-size tensor-model-parallel-size train-iters lr-decay-style overlap-comm lr data-path"
    assert set(tomllib.loads(text)) == set(given.split())
    assert "# ffn-hidden-size = 384\n" in text and "# lr-decay-iters = 10\n" in text and "# vocab-size = 257\n" in text
    path = tmp_path / "config.toml"
    path.write_text(text)
    again = parse(["--preset", str(path)])
    assert dataclasses.replace(again, preset="") == command.config
    longer, _ = resolve(parse(["--preset", str(path), "--hidden-size", "48", "--train-iters", "20"]), 8, 257, declare)
    assert longer.model.ffn_hidden_size == 4 * 48
    assert longer.training.global_batch_size == 4
    assert learning_rate(longer.optimizer, 10) == 0.5 and learning_rate(longer.optimizer, 20) == 0
    # a run of that preset gives the same preset and the other flags
    chain = read(["--preset", str(path), "--train-iters", "20"])
    assert tomllib.loads(chain.to_toml(longer)) == tomllib.loads(text) | {"train-iters": 20}


# -- resolve


def test_resolve_fills_in_what_is_derived() -> None:
    config, layout = resolve(
        make(micro_batch_size=2, tensor_model_parallel_size=4, pipeline_model_parallel_size=2, train_iters=77),
        24,
        257,
        declare,
    )
    assert layout == Layout(pp=2, dp=3, tp=4)
    assert (config.model.vocab_size, config.model.ffn_hidden_size) == (257, 4 * 768)
    assert (config.training.global_batch_size, config.micro_batches(layout.dp)) == (6, 1)
    assert config.optimizer.lr_decay_iters == 77
    assert config.training.grad_dtype == "fp32"
    assert resolve(config, 24, 257, declare) == (config, layout)


@for_each("asked", ["fp32", "fp64"])
def test_an_fp64_run_has_fp64_gradients(asked: str) -> None:
    assert resolve(make(precision="fp64", grad_dtype=asked), 1, 257, declare)[0].training.grad_dtype == "fp64"


def test_resolve_keeps_what_is_asked_for() -> None:
    config, layout = resolve(
        make(vocab_size=300, ffn_hidden_size=100, global_batch_size=24, lr_decay_iters=5, micro_batch_size=2),
        3,
        257,
        declare,
    )
    assert (config.model.vocab_size, config.model.ffn_hidden_size) == (300, 100)
    assert (config.training.global_batch_size, config.micro_batches(layout.dp)) == (24, 4)
    assert config.optimizer.lr_decay_iters == 5


# (options, ranks, vocabulary of the tokenizer, message)
EXPERTS = {"architecture": "llama", "num_experts": 4}
REFUSALS: list[tuple[dict[str, Any], int, int, str]] = [
    ({"master_weights": "split"}, 1, 9, "--master-weights split with --precision fp32: .* use --precision bf16, or"),
    ({"master_weights": "split", "precision": "fp16"}, 1, 9, "--master-weights split with --precision fp16: "),
    (
        {"adam_moments": "int8", "ffn_hidden_size": 352, "tensor_model_parallel_size": 2},
        2,
        9,
        "--adam-moments int8 with --tensor-model-parallel-size 2: it cuts the 11 blocks of 32 columns of "
        r"blocks\.0\.mlp\.down\.weight, which share an exponent; .* of 1, or --adam-moments fp32",
    ),
    (
        EXPERTS
        | {"adam_moments": "bf16", "moe_ffn_hidden_size": 192, "ffn_hidden_size": 512, "sequence_parallel": True}
        | {"tensor_model_parallel_size": 4},
        4,
        9,
        "--adam-moments bf16 with --expert-tensor-parallel-size 4: it cuts the 6 blocks of 32 columns of "
        r"blocks\.0\.mlp\.experts\.down\.weight, which are rounded together; .* of 1, 2, or",
    ),
    (
        {"adam_moments": "bf16", "hidden_size": 2**16, "ffn_hidden_size": 2**20, "num_attention_heads": 8},
        1,
        9,
        r"--adam-moments bf16: blocks\.0\.mlp\.up\.weight has too many elements, 68,719,476,736; use",
    ),
    ({"precision": "fp64", "fused_kernels": "triton"}, 1, 9, "--fused-kernels triton with --precision fp64: there are"),
    ({"optimizer": "muon", "optimizer_cpu_offload": True}, 1, 9, "--optimizer-cpu-offload with --optimizer muon: its"),
    (
        {"optimizer_offload_fraction": 0.5},
        1,
        9,
        "--optimizer-offload-fraction 0.5 needs --optimizer-cpu-offload; add it",
    ),
    ({"optimizer_nvme_offload": "/nvme"}, 1, 9, "--optimizer-nvme-offload /nvme needs --optimizer-cpu-offload; add it"),
    (
        {"optimizer_nvme_offload": "/nvme", "optimizer_cpu_offload": True, "save": "runs/s", "async_save": True},
        1,
        9,
        "--async-save with --optimizer-nvme-offload: a save in the background copies",
    ),
    ({"muon_scale": "keller"}, 1, 9, "--muon-scale keller needs --optimizer muon; add it"),
    ({"muon_momentum": 0.8, "optimizer": "lion"}, 1, 9, "--muon-momentum 0.8 needs --optimizer muon; add it"),
    ({"muon_num_ns_steps": 6}, 1, 9, "--muon-num-ns-steps 6 needs --optimizer muon; add it"),
    (
        {"plan": True, "world_size": 4, "device_type": "h100-80gb", "rehearse": "4"},
        1,
        9,
        "--rehearse 4 with --plan: both end before training",
    ),
    ({"layer_pattern": "LGX", "window_size": 8}, 1, 9, "--layer-pattern LGX has X; use the letters L .*, G .* and N"),
    ({"layer_pattern": "LG"}, 1, 9, "--layer-pattern LG needs --window-size W for its local layers; add it"),
    ({"layer_pattern": "GG", "window_size": 8}, 1, 9, "--window-size 8 needs a layer L in --layer-pattern GG; add one"),
    (
        {"architecture": "llama", "rotary_percent": 0.21, "hidden_size": 96},
        1,
        9,
        "--rotary-percent 0.21 of --hidden-size 96 / --num-attention-heads 12 = 8 is 1: .*; use 0.2513, which is 2",
    ),
    (
        {"architecture": "llama", "rotary_percent": 0.6, "kv_channels": 9},
        1,
        9,
        "--rotary-percent 0.6 of --kv-channels 9 is 5: rotary positions .*; use 0.4456, which is 4",
    ),
    ({"architecture": "llama", "rope_scaling_type": "yarn"}, 1, 9, "--rope-scaling-type yarn needs --rope-scaling-fac"),
    (
        {"architecture": "llama", "rope_trained_length": 9},
        1,
        9,
        "--rope-trained-length 9 needs --rope-scaling-factor F",
    ),
    (
        {"architecture": "llama", "local_rotary_base": 9.0},
        1,
        9,
        "--local-rotary-base 9.0 needs --window-size W; add it",
    ),
    ({"rotary_interleaved": True}, 1, 9, "--architecture gpt2 has no --rotary-interleaved; use one of"),
    ({"max_position_embeddings": 2048}, 1, 9, "--max-position-embeddings 2048 is not --seq-length 1024, and each"),
    ({"layer_pattern": "GN"}, 1, 9, "--layer-pattern GN: --architecture gpt2 has no rotary positions, .*; use G"),
    (
        {"hidden_size": 1024, "num_attention_heads": 15},
        1,
        9,
        "--hidden-size 1024 .* --num-attention-heads 15; use 16 heads$",
    ),
    (
        {"hidden_size": 97, "num_attention_heads": 12},
        1,
        9,
        "--hidden-size 97 is .* --num-attention-heads 12; use 1 head$",
    ),
    (
        {"tensor_model_parallel_size": 5},
        5,
        9,
        "--num-attention-heads 12 .* --tensor-model-parallel-size 5; use .* of 1, 2, 3, 4, 6, 12, or another",
    ),
    (
        {"num_attention_heads": 1, "tensor_model_parallel_size": 2},
        2,
        9,
        "--num-attention-heads 1 .*-size of 1, or another",
    ),
    (
        {"ffn_hidden_size": 27, "tensor_model_parallel_size": 2},
        2,
        9,
        "--ffn-hidden-size 27 .* --tensor-model-parallel-size 2; use .* of 1, 3, or another",
    ),
    ({"pipeline_model_parallel_size": 13}, 13, 9, "--pipeline-model-parallel-size 13 .* --num-layers 12.* at most 12"),
    (
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        6,
        9,
        "--tensor-model-parallel-size 2 x --pipeline-model-parallel-size 2 = 4 .* 6 ranks .*; start 4 or 8 .*nproc 4",
    ),
    ({"tensor_model_parallel_size": 4}, 2, 9, "= 4 does not divide the 2 ranks that were started; start 4 or 8"),
    ({}, 1, 0, "--tokenizer and --vocab-size are missing, .*; give --tokenizer PATH"),
    ({"vocab_size": 256, "tokenizer": "byte"}, 1, 257, "--vocab-size 256 .* 257 .* --tokenizer byte; use at least 257"),
    ({"precision": "fp64", "grad_dtype": "bf16"}, 1, 9, "--grad-dtype bf16: with --precision fp64, .*; drop it"),
    ({"grad_dtype": "fp64"}, 1, 9, "--grad-dtype fp64 needs --precision fp64, and that is fp32; use fp32, or"),
    ({"min_lr": 1.0, "lr": 0.5}, 1, 9, "--min-lr 1.0 is more than --lr 0.5; lower it"),
    (
        {"lr_warmup_iters": 10, "lr_decay_iters": 10, "lr_decay_style": "linear"},
        1,
        9,
        "--lr-warmup-iters 10 .* --lr-decay-iters 10 .*decay longer",
    ),
    ({"lr_warmup_iters": 9, "train_iters": 9, "lr_decay_style": "cosine"}, 1, 9, "--lr-warmup-iters 9 .* decay longer"),
    ({"mock_data": True}, 1, 0, "--mock-data needs --vocab-size, the number of tokens to draw from, such as"),
    ({"mock_data": True, "data_path": ("a",)}, 1, 9, "--mock-data with --data-path a: the data is made up .* drop one"),
    ({"mock_data": True, "data_args_path": "f"}, 1, 9, "--mock-data with --data-args-path f: the data is made up"),
    (
        {"mock_data": True, "eval_interval": 5, "eval_iters": 0},
        1,
        9,
        "--eval-iters 0 evaluates a whole split, .* endless",
    ),
    ({"rampup_batch_size": (1, 2)}, 1, 9, "--rampup-batch-size 1 2: give three numbers .* such as 32 32 100000"),
    ({"rampup_batch_size": (1, 0, 9)}, 1, 9, "--rampup-batch-size 1 0 9: give three numbers"),
    ({"rampup_batch_size": (8, 1, 9), "global_batch_size": 8}, 1, 9, "8 1 9: START must be less than .* 8; lower"),
    (
        {"rampup_batch_size": (2, 4, 9), "global_batch_size": 8},
        1,
        9,
        "2 4 9: INCREMENT must divide the 6 samples .* 8; use 2 or 3",
    ),
    ({"lr_decay_style": "wsd", "train_iters": 50}, 1, 9, "--lr-wsd-decay-iters 0 and .* --lr-wsd-decay-iters 5, or"),
    ({"lr_decay_style": "cosine", "lr_wsd_decay_iters": 7}, 1, 9, "--lr-wsd-decay-iters 7 and --lr-decay-style cosine"),
    (
        {"lr_decay_style": "wsd", "lr_warmup_iters": 4, "lr_wsd_decay_iters": 7, "train_iters": 10},
        *(1, 9, "--lr-warmup-iters 4 and --lr-wsd-decay-iters 7 together are more than --lr-decay-iters 10"),
    ),
    (
        {"partition_activations": True, "tensor_model_parallel_size": 2},
        2,
        9,
        "--partition-activations needs --recompute full; add it, or drop",
    ),
    ({"checkpoint_in_cpu": True}, 1, 9, "--checkpoint-in-cpu needs --recompute full; add"),
    (
        {"contiguous_checkpointing": True, "recompute": "selective"},
        1,
        9,
        "--contiguous-checkpointing needs --recompute full",
    ),
    (
        {"sequence_parallel": True},
        1,
        9,
        "--sequence-parallel needs a --tensor-model-parallel-size of at least 2; raise it",
    ),
    (
        {"sequence_parallel": True, "tensor_model_parallel_size": 4, "seq_length": 6, "micro_batch_size": 1},
        4,
        9,
        "--sequence-parallel needs .* 1 x --seq-length 6 .* 4; use a --micro-batch-size that is a multiple of 2",
    ),
    (
        {
            "sequence_parallel": True,
            "tensor_model_parallel_size": 2,
            "partition_activations": True,
            "recompute": "full",
        },
        2,
        9,
        "--partition-activations with --sequence-parallel: .*; drop one of them",
    ),
    (
        {"partition_activations": True, "recompute": "full"},
        1,
        9,
        "--partition-activations needs a --tensor-model-parallel-size of at least 2; raise it",
    ),
    ({"save_interval": 5}, 1, 9, "--save-interval 5 needs --save DIR"),
    ({"save_hf": "x"}, 1, 9, "--save-hf x needs --save DIR"),
    ({"decay_from": "s/iter_0000005", "decay_iters": 3}, 1, 9, "--decay-from s/iter_0000005 needs --save DIR and"),
    ({"decay_from": "s/iter_0000005", "save": "x"}, 1, 9, "--decay-from .* needs --save DIR and --decay-iters K"),
    ({"decay_iters": 3}, 1, 9, "--decay-iters 3 needs --decay-from S/iter_N"),
    ({"save": "x", "save_hf_interval": 5}, 1, 9, "--save-hf-interval 5 needs --save-hf DIR"),
    ({"save": "x", "save_hf": "./x"}, 1, 9, "--save-hf ./x is the folder of --save"),
    (
        {"virtual_pipeline_stages": 2},
        1,
        9,
        "--virtual-pipeline-stages 2 with --pipeline-schedule 1f1b: .* both, or",
    ),
    ({"pipeline_schedule": "interleaved"}, 1, 9, "--virtual-pipeline-stages 1 with --pipeline-schedule interleaved"),
    (
        {"pipeline_schedule": "interleaved", "virtual_pipeline_stages": 2},
        1,
        9,
        "interleaved needs a pipeline, and --pipeline-model-parallel-size is 1; raise it",
    ),
    (
        {"pipeline_schedule": "interleaved", "virtual_pipeline_stages": 7, "pipeline_model_parallel_size": 2},
        2,
        9,
        "--virtual-pipeline-stages 7 x --pipeline-model-parallel-size 2 = 14 is more than --num-layers 12.* at most 6",
    ),
    (
        {"pipeline_schedule": "interleave"},
        1,
        9,
        "--pipeline-schedule interleave is unknown; use one of gpipe, .*; did you mean interleaved",
    ),
    (
        {"pipeline_schedule": "zero-bubble-v", "virtual_pipeline_stages": 3},
        2,
        9,
        "--virtual-pipeline-stages 3 with --pipeline-schedule zero-bubble-v: .* 2 virtual stages per rank; use 2",
    ),
    (
        {"zero_bubble_backlog": 1},
        1,
        9,
        "--zero-bubble-backlog 1 applies to --pipeline-schedule zero-bubble, zero-bubble-v, not 1f1b",
    ),
    ({"keep_last": 2}, 1, 9, "--keep-last 2 needs --save DIR"),
    ({"memory_checkpoint_interval": 5}, 1, 9, "--memory-checkpoint-interval 5 needs --save DIR"),
    ({"save": "x", "memory_checkpoint_dir": "y"}, 1, 9, "needs --memory-checkpoint-interval N; add it"),
    (
        {"save": "x", "save_interval": 5, "save_interval_minutes": 10.0},
        1,
        9,
        "--save-interval-minutes 10 with --save-interval 5: .* give one of them",
    ),
    ({"profile_iterations": "2:3"}, 1, 9, "--profile-iterations 2:3 needs --log-dir DIR"),
    *(
        ({"profile_iterations": text, "log_dir": "x"}, 1, 9, f"--profile-iterations {text}: must be A:B, .* such as")
        for text in ("5", "5:", ":5", "a:b", "0:2", "3:2", "-1:2", "1:2:3")
    ),
    (
        {"profile_iterations": "2:30", "log_dir": "x", "train_iters": 20},
        1,
        9,
        "--profile-iterations 2:30: iteration 30 is not reached, because --train-iters is 20",
    ),
    ({"eval_only": True}, 1, 9, "--eval-only needs --load DIR"),
    ({"eval_split": "test"}, 1, 9, "--eval-split test needs --eval-only; add it"),
    ({"wandb_project": "gpt"}, 1, 9, "--wandb-project gpt needs --log-dir DIR"),
    ({"sample_prompts": "p"}, 1, 9, "--sample-prompts p needs --sample-interval N"),
    ({"task_interval": 5}, 1, 9, "--task-interval 5 needs --tasks FILE; add it, or drop --task-interval"),
    ({"task_limit": 5}, 1, 9, "--task-limit 5 needs --tasks FILE"),
    ({"sample_interval": 5}, 1, 9, "--sample-interval 5 needs --sample-prompts FILE"),
    ({"wandb_project": "a/b", "log_dir": "l"}, 1, 9, "--wandb-project a/b: Weights & Biases allows .* use another"),
    ({"wandb_project": "n" * 129, "log_dir": "l"}, 1, 9, "--wandb-project n+.*: Weights & Biases allows"),
    ({"wandb_name": "a"}, 1, 9, "--wandb-name a needs --wandb-project PROJECT"),
    *(
        (
            {"num_experts": 4, "architecture": name},
            1,
            9,
            f"--num-experts 4 with --architecture {name}: .* llama, .*drop",
        )
        for name in ("gpt2", "gpt-neox", "gptj", "starcoder2", "parallel")
    ),
    *(
        ({"architecture": "llama", **given}, 1, 9, f"{flag} needs --num-experts E; add it, or drop {flag.split()[0]}")
        for given, flag in [
            ({"moe_router_topk": 3}, "--moe-router-topk 3"),
            ({"moe_router_pre_softmax": True}, "--moe-router-pre-softmax"),
            ({"moe_ffn_hidden_size": 24}, "--moe-ffn-hidden-size 24"),
            ({"moe_layer_freq": "DE"}, "--moe-layer-freq DE"),
            ({"moe_shared_expert_intermediate_size": 24}, "--moe-shared-expert-intermediate-size 24"),
            ({"moe_shared_expert_gate": True}, "--moe-shared-expert-gate"),
            ({"moe_aux_loss_coeff": 0.01}, "--moe-aux-loss-coeff 0.01"),
            ({"moe_z_loss_coeff": 0.001}, "--moe-z-loss-coeff 0.001"),
            ({"moe_expert_capacity_factor": 1.25}, "--moe-expert-capacity-factor 1.25"),
        ]
    ),
    ({**EXPERTS, "moe_router_topk": 5}, 1, 9, "--moe-router-topk 5 is more than --num-experts 4; use at most 4"),
    *(
        (
            {**EXPERTS, "moe_layer_freq": pattern},
            1,
            9,
            f"--moe-layer-freq {pattern or chr(39) * 2}: give a number .* such as DE$",
        )
        for pattern in ("0", "", "de", "D E", "DEX", "-1", "1.5", "01", "\uff11", "9" * 10)
    ),
    *(
        ({**EXPERTS, "num_layers": 3, "moe_layer_freq": pattern}, 1, 9, f"--moe-layer-freq {pattern} leaves none of")
        for pattern in ("D", "DDDE")
    ),
    (
        {**EXPERTS, "moe_shared_expert_gate": True},
        1,
        9,
        "--moe-shared-expert-gate needs --moe-shared-expert-intermediate-size W; add it, or drop",
    ),
    *(
        ({**EXPERTS, "num_attention_heads": 6, "hidden_size": 48, "tensor_model_parallel_size": 2, **given}, 2, 9, said)
        for given, said in [
            (
                {"moe_ffn_hidden_size": 33},
                "--moe-ffn-hidden-size 33 is not divisible by --tensor-model-parallel-size 2; ",
            ),
            ({"ffn_hidden_size": 33}, "--ffn-hidden-size 33 is not divisible by --tensor-model-parallel-size 2; use a"),
            (
                {"moe_ffn_hidden_size": 33, "expert_tensor_parallel_size": 2},
                "--moe-ffn-hidden-size 33 is not divisible by --expert-tensor-parallel-size 2; use an --expert-tensor-",
            ),
            (
                {"ffn_hidden_size": 33, "moe_ffn_hidden_size": 32, "moe_layer_freq": "2"},
                "--ffn-hidden-size 33 is not divisible by --tensor-model-parallel-size 2; use a",
            ),
            (
                {"moe_shared_expert_intermediate_size": 33},
                "--moe-shared-expert-intermediate-size 33 is not divisible by --tensor-model-parallel-size 2; use a",
            ),
        ]
    ),
    *(
        ({"architecture": "llama", **given}, 1, 9, f"{said}; add (it|both), or drop {said.split()[0]}")
        for given, said in [
            ({"moe_router_score_function": "sigmoid"}, "--moe-router-score-function sigmoid needs --num-experts E"),
            ({"moe_router_enable_expert_bias": True}, "--moe-router-enable-expert-bias needs --num-experts E"),
            (
                {"moe_router_topk_scaling_factor": 2.5},
                "--moe-router-topk-scaling-factor 2.5 needs --num-experts E",
            ),
            (
                {"moe_router_bias_update_rate": 0.1, "num_experts": 4},
                "--moe-router-bias-update-rate 0.1 needs --moe-router-enable-expert-bias",
            ),
            (
                {"moe_router_num_groups": 2, "num_experts": 4},
                "--moe-router-num-groups 2 needs --moe-router-group-topk K",
            ),
            (
                {"moe_router_group_topk": 1, "num_experts": 4},
                "--moe-router-group-topk 1 needs --moe-router-num-groups G",
            ),
        ]
    ),
    *(
        (
            {"architecture": "llama", "num_experts": 12, **given},
            1,
            9,
            said,
        )
        for given, said in [
            (
                {"moe_router_num_groups": 5, "moe_router_group_topk": 1},
                "--moe-router-num-groups 5 does not divide --num-experts 12; use one of 1, 2, 3, 4, 6, 12$",
            ),
            (
                {"moe_router_num_groups": 2, "moe_router_group_topk": 3},
                "--moe-router-group-topk 3 is more than --moe-router-num-groups 2; use at most 2$",
            ),
            (
                {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 7},
                "--moe-router-topk 7: the groups of --moe-router-group-topk 2 have only 6 experts; use .* at least 3$",
            ),
        ]
    ),
    *(
        ({flag.replace("-", "_"): True}, 1, 9, f"--{flag} needs --tokenizer")
        for flag in ("eod-mask-loss", "reset-attention-mask", "reset-position-ids")
    ),
    *(
        ({flag.replace("-", "_"): 0}, 1, 9, f"--{flag} 0: must be (at least 1|more than 0)")
        for flag in (
            *("num-layers", "hidden-size", "num-attention-heads", "seq-length", "micro-batch-size", "train-iters"),
            *("tensor-model-parallel-size", "pipeline-model-parallel-size", "virtual-pipeline-stages"),
            *("distributed-timeout-minutes", "adam-eps", "log-interval", "reduce-bucket-size"),
            *("initial-loss-scale", "min-loss-scale", "loss-scale-window", "hysteresis"),
        )
    ),
    *(
        ({flag.replace("-", "_"): -1}, 1, 9, f"--{flag} -1: must (not be negative|be more than [01]|be at least 1)")
        for flag, (_, kind, *_) in flags().items()
        if kind in (int, float) and flag not in ("seed", "loss-chunk-tokens")  # -1 is a choice of theirs
    ),
    *(
        ({flag.replace("-", "_"): value}, 1, 9, f"--{flag} {value}: must be finite")
        for flag, (_, kind, *_) in flags().items()
        for value in (float("nan"), float("inf"))
        if kind is float
    ),
    *(
        ({flag.replace("-", "_"): 1.0}, 1, 9, f"--{flag} 1.0: must be less than 1")
        for flag in ("attention-dropout", "hidden-dropout", "adam-beta1", "adam-beta2")
    ),
]


def test_packed_documents_do_not_see_each_other() -> None:
    """Resolved once; no end-of-document token is needed, unless for --eod-mask-loss."""
    config, _ = resolve(make(packing="best-fit"), 1, 9, declare)
    assert config.data.reset_attention_mask and config.data.reset_position_ids and not document_flags(config.data)
    assert document_flags(dataclasses.replace(config.data, eod_mask_loss=True)) == ("--eod-mask-loss",)
    assert resolve(make(), 1, 9, declare)[0].data == DataConfig()
    with pytest.raises(ValueError, match=r"^--packing best-fit with --mock-data: .* drop one of them"):
        resolve(make(packing="best-fit", mock_data=True), 1, 9, declare)


@for_each(
    ("options", "kinds"),
    [
        ({}, "GGGGG"),
        ({"window_size": 8}, "LLLLL"),
        ({"window_size": 8, "layer_pattern": "LLG"}, "LLGLL"),
        ({"architecture": "llama", "layer_pattern": "GGGN"}, "GGGNG"),
    ],
)
def test_kinds_of_attention_repeat_over_the_layers(options: dict[str, Any], kinds: str) -> None:
    config, _ = resolve(make(num_layers=5, **options), 1, 9, declare)
    assert "".join(map(config.model.attention_kind, range(5))) == kinds


@for_each(
    ("pattern", "layers"), [("1", [0, 1, 2, 3, 4]), ("2", [0, 2, 4]), ("7", [0]), ("DE", [1, 3]), ("EED", [0, 1, 3, 4])]
)
def test_layers_with_experts_repeat(pattern: str, layers: list[int]) -> None:
    config, _ = resolve(make(num_layers=5, **EXPERTS, moe_layer_freq=pattern), 1, 9, declare)
    assert config.model.expert_layers == layers
    assert [number for number in range(5) if any(
        spec.name == f"blocks.{number}.mlp.router.weight" for spec in declare(config.model).params()
    )] == layers  # fmt: skip


@for_each("architecture", ["qwen2-moe", "qwen3-moe", "mixtral", "olmoe"])
def test_architectures_with_experts_go_without(architecture: str) -> None:
    """Their defaults of other flags are no user's choice. A gate without a shared expert has no weight."""
    for flags_ in ([], ["--num-experts", "0"]):
        config, _ = resolve(parse(["--architecture", architecture, *flags_]), 1, 9, declare)
        names = {spec.name.split(".", 2)[-1] for spec in declare(config.model).params() if ".mlp." in spec.name}
        dense = {"mlp.up.weight", "mlp.down.weight"}
        assert names == (dense if flags_ else {"mlp.router.weight", "mlp.experts.up.weight", "mlp.experts.down.weight"})


@for_each(("options", "ranks", "vocab_size", "said"), REFUSALS)
def test_resolve_refuses(options: dict[str, Any], ranks: int, vocab_size: int, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}" if said.startswith("--") else said):
        resolve(make(**options), ranks, vocab_size, declare)


def test_the_largest_batch_that_is_named_is_accepted() -> None:
    """pp 2, cp 3, dp 5; micro-batches of 7 through 3 of 5 layers: 2 ** 17 // 3 micro-batches on each of 5 replicas."""
    axes = {"pipeline_model_parallel_size": 2, "context_parallel_size": 3, "num_layers": 5, "micro_batch_size": 7}
    most = 2**17 // 3 * 7 * 5
    with pytest.raises(ValueError, match=rf"is 43691 micro-batches of 7 samples .* 3 layers each.* at most {most}, "):
        resolve(make(**axes, vocab_size=9, global_batch_size=most + 1), 30, 0, declare)
    resolve(make(**axes, vocab_size=9, global_batch_size=most), 30, 0, declare)


def test_resolve_accepts_what_is_just_inside() -> None:
    for options, ranks in [
        ({"pipeline_model_parallel_size": 12}, 12),
        ({"tensor_model_parallel_size": 12}, 12),
        ({"min_lr": 0.5, "lr": 0.5}, 1),
        ({"lr": 0.0, "weight_decay": 0.0, "clip_grad": 0.0, "seed": -1}, 1),
        ({"lr_warmup_iters": 9, "lr_decay_iters": 10, "lr_decay_style": "linear"}, 1),
        ({"lr_warmup_iters": 5000}, 1),  # constant: a warm-up may outlast the run
        ({"partition_activations": True, "recompute": "full", "tensor_model_parallel_size": 2}, 2),
        ({"sequence_parallel": True, "tensor_model_parallel_size": 2, "seq_length": 7, "micro_batch_size": 2}, 2),
        ({"checkpoint_in_cpu": True, "contiguous_checkpointing": True, "recompute": "full"}, 1),
        ({"eod_mask_loss": True, "tokenizer": "byte"}, 1),
        ({"vocab_size": 9}, 1),
        ({**EXPERTS, "moe_router_topk": 4, "moe_layer_freq": "E"}, 1),
        ({**EXPERTS, "moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_layer_freq": "DE"}, 1),
        ({**EXPERTS, "moe_layer_freq": "999", "num_layers": 2}, 1),  # layer 0
        (
            {**EXPERTS, "moe_ffn_hidden_size": 33, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
            | {"sequence_parallel": True},
            2,
        ),
        ({**EXPERTS, "ffn_hidden_size": 33, "moe_ffn_hidden_size": 32, "tensor_model_parallel_size": 2}, 2),
    ]:
        config, layout = resolve(make(**options), ranks, 9, declare)
        assert layout.world_size == ranks and config.model.vocab_size == 9


def test_corpora_that_the_metrics_tell_apart() -> None:
    """Named with weights or without; a blend of many has no numbers per corpus."""
    for words, count in (((), 1), (("a",), 1), (("a", "b", "c"), 3), (("1", "a", ".5", "b"), 2), (("a",) * 101, 1)):
        assert named_corpora(words) == count, words


WIDE_HEADS = {"architecture": "llama", "kv_channels": 264, "precision": "bf16", "seq_length": 64, "vocab_size": 9}


@for_each(
    ("options", "refusal"),
    [
        (
            {"window_size": 8},
            "--window-size 8 with heads of width 264 in bf16.*FlashAttention.*at most 256; use --kv-channels 256",
        ),
        ({"reset_attention_mask": True}, "--reset-attention-mask with heads of width 264"),
        ({"context_parallel_size": 2}, "--context-parallel-size 2 with heads of width 264"),
        ({"context_parallel_size": 2, "kv_channels": 128}, ""),
        ({"window_size": 64}, ""),
        ({"window_size": 8, "kv_channels": 256}, ""),
        ({"window_size": 8, "precision": "fp32"}, ""),
        ({"window_size": 8, "attention_softcap": 5.0}, ""),
    ],
)
def test_pieces_of_samples_on_a_gpu_have_heads_of_flash_attention(options: dict[str, Any], refusal: str) -> None:
    config = make(**WIDE_HEADS | options)
    check_device(config, "cpu")
    with pytest.raises(ValueError, match=refusal) if refusal else contextlib.nullcontext():
        check_device(config, "cuda")


def test_all_faults_of_a_command_are_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Unknown flags, values, needs and combinations; not those which a fault above explains."""
    wrong = "--num-layers 0 --keep-every 5 --wandb-project a/b --min-lr 9 --tensor-model-parallel-size 3"
    faults = [
        "--num-layers 0: must be at least 1",
        "--keep-every 5 needs --keep-last N",
        "--wandb-project a/b needs --log-dir DIR",
        "--wandb-project a/b: Weights & Biases allows",
        "--min-lr 9.0 is more than --lr 0.0003",
    ]
    with pytest.raises(ValueError) as refused:
        check_values(read(wrong.split()).config)
    lines = str(refused.value).splitlines()
    assert len(lines) == len(faults) and all(map(str.startswith, lines, faults)), lines
    with pytest.raises(SystemExit):
        read(["--nonsense", "3", *wrong.split()])
    first, *rest = capsys.readouterr().err.splitlines()
    assert first.startswith("--nonsense 3: no such flag.") and rest == lines
    with pytest.raises(SystemExit):
        read("--keep-last-one 3 --keep-every 5".split())
    assert "--keep-every 5 needs" not in capsys.readouterr().err  # --keep-last may have been meant
