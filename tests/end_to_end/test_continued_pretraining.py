"""--load of a Hugging Face folder: training continues from its weights, in any layout."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megazero.data.corpora import open_datasets
from megazero.flags.cli import parse
from megazero.interop.huggingface.model_flags import find_model
from tests.end_to_end.cli import metrics, pretrain
from tests.end_to_end.test_generate import write_tokenizer
from tests.reference_run import read_checkpoint, write_corpus

LENGTH, WORDS, BATCH, SEED = 16, 61, 4, 5
SHAPE = {"hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 3, "vocab_size": WORDS}
SHAPE |= {"max_position_embeddings": LENGTH, "initializer_range": 0.2}
EXPERTS = {"num_key_value_heads": 2, "intermediate_size": 40, "num_experts_per_tok": 3, "num_experts": 4}
NARROW = {"moe_intermediate_size": 28, "shared_expert_intermediate_size": 20, "mlp_only_layers": [1]}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "intermediate_size": 40, "rms_norm_eps": 1e-5},
    "qwen3": {"num_key_value_heads": 2, "intermediate_size": 40, "head_dim": 8, "tie_word_embeddings": True},
    "ministral": {"num_key_value_heads": 2, "intermediate_size": 40, "head_dim": 6, "sliding_window": 5},
    "qwen2_moe": EXPERTS | NARROW,
    "mixtral": EXPERTS | {"head_dim": 6},
    "gpt2": {"n_inner": 40, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}
LAYOUTS = {
    "tp 2": ["--tensor-model-parallel-size", 2, "--zero-stage", 0],
    "pp 2": ["--pipeline-model-parallel-size", 2, "--global-batch-size", BATCH],
    "zero 3": ["--zero-stage", 3],
    "ep 2": ["--expert-model-parallel-size", 2, "--zero-stage", 3],
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, draw = tmp_path_factory.mktemp("corpus"), random.Random(0)
    write_corpus(folder / "words", "<u2", [[draw.choices(range(WORDS), k=50)] for _ in range(20)])
    return folder / "words"


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """theirs(model type) -> a folder that transformers wrote: random weights in two files, and a tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    root = tmp_path_factory.mktemp("theirs")

    def folder(model_type: str) -> Path:
        path = root / model_type
        if not path.exists():
            torch.manual_seed(1)
            config = AutoConfig.for_model(model_type, **SHAPE, **MODELS[model_type])
            model = AutoModelForCausalLM.from_config(config)
            write_tokenizer(path, SEED)
            model.save_pretrained(path, max_shard_size="20kB")
            assert len(list(path.glob("*.safetensors"))) > 1
        return path

    return folder


def loss_of_theirs(folder: Path, corpus: Path, first: int = 0) -> float:
    """Return the loss by transformers of the global batch that begins at a sample of the corpus."""
    from transformers import AutoModelForCausalLM

    flags = ["--hf-config", str(folder), "--data-path", str(corpus)]
    config = parse(flags, find_model)
    data, seed = config.data, config.training.seed
    datasets = open_datasets(data.data_path, data.split, LENGTH, seed, WORDS)
    ids = torch.stack([torch.as_tensor(datasets.train[first + i].ids) for i in range(BATCH)])
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(ids[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()


@pytest.mark.parametrize(
    ("model_type", "layout"),
    [
        pytest.param("llama", "tp 2", marks=pytest.mark.slow),  # in the next test too
        pytest.param("qwen3", "pp 2", marks=pytest.mark.slow),
        pytest.param("gpt2", "zero 3", marks=pytest.mark.second),
        pytest.param("gpt2", "tp 2", marks=pytest.mark.slow),
        pytest.param("llama", "zero 3", marks=pytest.mark.slow),
        ("qwen2_moe", "ep 2"),
        pytest.param("mixtral", "tp 2", marks=pytest.mark.slow),
        pytest.param("mixtral", "pp 2", marks=pytest.mark.slow),
    ],
)
def test_the_first_loss_is_transformers_own(model_type: str, layout: str, theirs, corpus: Path, tmp_path: Path) -> None:
    folder = theirs(model_type)
    flags = ["--load", folder, "--data-path", corpus, "--global-batch-size", BATCH, "--train-iters", 1, "--lr", 0]
    done = pretrain(*flags, "--min-lr", 0, *LAYOUTS[layout], "--log-dir", tmp_path, "--save", tmp_path / "run", ranks=2)
    assert done.returncode == 0, done.stderr
    (record,) = metrics(tmp_path)
    assert abs(record["loss"] - loss_of_theirs(folder, corpus)) < 1e-5
    assert record["iteration"] == 1 and f"loaded the weights of {folder}" in done.stdout + done.stderr
    # without an update, the checkpoint has the weights bit for bit, as an import has them
    from megazero.console.checkpoint_tool import Import, import_checkpoint

    assert import_checkpoint(Import(folder, tmp_path / "imported")) == 0
    ours, wanted = (read_checkpoint(tmp_path / name) for name in ("run/iter_0000001", "imported/iter_0000000"))
    assert all(torch.equal(ours[name], value) for name, value in wanted.items())


def test_an_evaluation_of_the_folder_itself(theirs, corpus: Path, tmp_path: Path) -> None:
    flags = ["--load", theirs("llama"), "--data-path", corpus, "--global-batch-size", BATCH, "--eval-only"]
    done = pretrain(*flags, "--eval-split", "train", "--eval-iters", 1, "--log-dir", tmp_path)
    assert done.returncode == 0, done.stderr
    assert abs(metrics(tmp_path)[-1]["train_loss"] - loss_of_theirs(theirs("llama"), corpus)) < 1e-5


def changed(folder: Path, change: str) -> None:
    """Make a folder of theirs one that is refused."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name = "model.layers.1.mlp.up_proj.weight"
    file = folder / index["weight_map"][name]
    weights = load_file(file)
    if change == "missing":
        del weights[name], index["weight_map"][name]
    elif change == "shape":
        weights[name] = weights[name].t().contiguous()
    elif change == "not finite":
        weights[name][3, 0] = torch.inf
    elif change == "quantised":
        weights[name] = weights[name].to(torch.int8)
    save_file(weights, file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if change == "pickle":
        for path in folder.glob("model*"):
            path.unlink()
        torch.save({}, folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("change", "flags", "words"),
    [
        ("missing", "", "missing model.layers.1.mlp.up_proj.weight, unknown none"),
        (
            "shape",
            "",
            "model.layers.1.mlp.up_proj.weight is [24, 40], and the model of config.json and the flags needs",
        ),
        ("pickle", "", "found only pytorch_model.bin, a pickle, which could run code"),
        ("not finite", "", "blocks.1.mlp.up.weight holds values that are not finite"),
        ("quantised", "", "model.layers.1.mlp.up_proj.weight is of int8, a quantised weight perhaps"),
        ("none", "--num-layers 2", "missing none, unknown model.layers.2."),
        ("none", "--hidden-size 48", "is [61, 24], and the model of config.json and the flags needs [61, 48]"),
        ("none", "--add-qkv-bias", "is a llama, which has no --add-qkv-bias; leave it out"),
    ],
)
def test_refusals(change: str, flags: str, words: str, theirs, corpus: Path, tmp_path: Path, refusal) -> None:
    folder = tmp_path / "theirs"
    shutil.copytree(theirs("llama"), folder)
    changed(folder, change)
    words_of_run = ["--load", folder, "--data-path", corpus, "--train-iters", 1, *flags.split()]
    done = refusal(*words_of_run, "--save", tmp_path / "run")
    assert done.returncode == 1
    assert f"--load {folder}" in done.stderr + done.stdout or change == "quantised"
    assert words in done.stderr, done.stderr
    assert not list(tmp_path.glob("run/iter_*"))


# -- --save-hf


def keys_of(folder: Path, name: str) -> set[str]:
    return set(json.loads((folder / name).read_text()))


def tensors(folder: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    weights = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
    return {name: (tuple(value.shape), value.dtype) for name, value in weights.items()}


RINGS = {"ministral": pytest.mark.second}  # whose model is Mistral's: an export has the type of the folder
EACH = [pytest.param(name, marks=RINGS.get(name, pytest.mark.slow)) for name in MODELS]


@pytest.mark.parametrize("model_type", EACH)
def test_continued_pretraining_there_and_back(model_type: str, theirs, corpus: Path, tmp_path: Path) -> None:
    """Two ranks train transformers' model; transformers computes the loss of the next batch from their export.

    Samples are shorter than the model's context, which its exports keep if positions are rotary.
    """
    from transformers import AutoConfig

    folder, flags = tmp_path / "theirs", ["--data-path", corpus, "--global-batch-size", BATCH, "--lr", 1e-2]
    shutil.copytree(theirs(model_type), folder)
    longest = LENGTH if model_type == "gpt2" else 4 * LENGTH
    keys = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": longest}
    (folder / "config.json").write_text(json.dumps(keys))
    flags += ["--save", tmp_path / "run", "--save-hf", tmp_path / "exports"]
    first = [
        "--load",
        folder,
        "--seq-length",
        LENGTH,
        "--train-iters",
        3,
        "--save-hf-interval",
        2,
        "--log-dir",
        tmp_path / "a",
    ]
    done = pretrain(*flags, *first, "--tensor-model-parallel-size", 2, ranks=2)
    assert done.returncode == 0, done.stderr
    losses = [record["loss"] for record in metrics(tmp_path / "a")]
    assert abs(losses[0] - loss_of_theirs(folder, corpus)) < 1e-5 and losses[0] - losses[-1] > 1e-3
    assert sorted(path.name for path in (tmp_path / "exports").iterdir()) == ["iter_0000002", "iter_0000003"]
    export = tmp_path / "exports" / "iter_0000002"
    assert abs(losses[2] - loss_of_theirs(export, corpus, first=2 * BATCH)) < 1e-5
    written = export.stat().st_mtime_ns

    # a resume by --load alone, whose model is that of the checkpoint, repeats no export
    again = ["--load", tmp_path / "run", "--train-iters", 4, "--log-dir", tmp_path / "b"]
    done = pretrain(*flags, *again, "--zero-stage", 3, ranks=2)
    assert done.returncode == 0, done.stderr
    (record,) = metrics(tmp_path / "b")
    assert abs(record["loss"] - loss_of_theirs(tmp_path / "exports" / "iter_0000003", corpus, 3 * BATCH)) < 1e-5
    assert export.stat().st_mtime_ns == written and (tmp_path / "exports" / "iter_0000004").is_dir()
    contexts = [AutoConfig.from_pretrained(each).max_position_embeddings for each in (tmp_path / "exports").iterdir()]
    assert contexts == [longest] * 3

    # an export begins the next run
    again = ["--load", export, "--seq-length", LENGTH, "--train-iters", 1, "--log-dir", tmp_path / "c"]
    done = pretrain("--data-path", corpus, *again)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("model_type", EACH)
def test_an_export_has_the_files_and_keys_that_transformers_writes(
    model_type: str, theirs, corpus: Path, tmp_path: Path
) -> None:
    """Its model and tokenizer, read and saved by transformers: the same files, keys, tensors, shapes and types."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    flags = ["--load", theirs(model_type), "--data-path", corpus, "--train-iters", 1, "--precision", "bf16"]
    done = pretrain(*flags, "--save", tmp_path / "run", "--save-hf", tmp_path / "exports")
    assert done.returncode == 0, done.stderr
    (export,) = (tmp_path / "exports").iterdir()
    model = AutoModelForCausalLM.from_pretrained(export, local_files_only=True)
    assert model.dtype == torch.bfloat16
    model.save_pretrained(tmp_path / "saved")
    AutoTokenizer.from_pretrained(export).save_pretrained(tmp_path / "saved")
    saved = tmp_path / "saved"
    assert {path.name for path in export.iterdir()} == {path.name for path in saved.iterdir()}
    for name in ("config.json", "generation_config.json"):
        assert keys_of(export, name) == keys_of(saved, name), name
    assert tensors(export) == tensors(saved)
    given = json.loads((theirs(model_type) / "config.json").read_text())
    found = json.loads((export / "config.json").read_text())
    changed = {key for key in given if given[key] != found.get(key)}
    assert changed <= {"dtype", "bos_token_id", "eos_token_id", "pad_token_id"}, changed


def test_exports_of_another_run_are_not_replaced(theirs, corpus: Path, tmp_path: Path, refusal) -> None:
    (tmp_path / "exports" / "iter_0000007").mkdir(parents=True)
    flags = ["--load", theirs("llama"), "--data-path", corpus, "--train-iters", 1, "--save", tmp_path / "run"]
    done = refusal(*flags, "--save-hf", tmp_path / "exports")
    assert done.returncode == 1 and "holds iter_0000007 of an earlier run; name another folder" in done.stderr


def test_a_model_that_an_export_would_change_is_refused(corpus: Path, tmp_path: Path, refusal) -> None:
    model = "--num-layers 1 --hidden-size 24 --num-attention-heads 4 --seq-length 16 --vocab-size 61 --train-iters 1"
    flags = [*model.split(), "--data-path", corpus, "--save", tmp_path / "run", "--save-hf", tmp_path / "exports"]
    for option, words in (
        ("--architecture parallel", "--architecture parallel has no table that converts"),
        (
            "--architecture gpt2 --residual-multiplier 0.5",
            "no model of Hugging Face is a gpt2 with --residual-multiplier 0.5",
        ),
    ):
        done = refusal(*flags, *option.split())
        assert done.returncode == 1 and words in done.stderr, done.stderr
        assert not (tmp_path / "exports").exists()
