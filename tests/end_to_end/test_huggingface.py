"""scripts/checkpoint.py export and import, between checkpoints of real runs and transformers."""

import functools
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megazero.checkpoint import find, streaming
from megazero.console.checkpoint_tool import Export, Import, export_checkpoint, import_checkpoint
from megazero.data.tokenizer import PROBE, load_tokenizer
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.model.layers.context import MicroBatchInfo
from megazero.engine.plan.layout.topology import Layout
from megazero.families import with_traits
from megazero.flags.config import ModelConfig
from megazero.generation.model import InferenceModel, hidden_states
from megazero.interop.huggingface.families import family_of
from megazero.run.run_state import RunState, run_tokenizer
from megazero.units import size
from tests.end_to_end.cli import metrics, pretrain
from tests.end_to_end.test_generate import write_tokenizer
from tests.helpers.families import of_family
from tests.helpers.rings import by_default
from tests.helpers.rounding import model_tolerance
from tests.reference_run import read_checkpoint, write_corpus

LAYERS, HIDDEN, HEADS, LENGTH, WORDS = 3, 24, 4, 12, 61
SIZES = ["--num-layers", LAYERS, "--hidden-size", HIDDEN, "--num-attention-heads", HEADS, "--seq-length", LENGTH]
SIZES += ["--ffn-hidden-size", 40, "--init-method-std", 0.3, "--global-batch-size", 4, "--lr", 1e-2]
OLMO2 = {"qk_layernorm": True, "qk_norm_all_heads": True}
KINDS = {"tied": [], "untied": ["--untie-embeddings"]}
NEAR = model_tolerance(ModelConfig(LAYERS, HIDDEN, 0, HEADS, LENGTH, WORDS), torch.float32)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    folder = tmp_path_factory.mktemp("huggingface")
    draw = random.Random(0)
    write_corpus(folder / "words", "<u2", [[draw.choices(range(WORDS), k=50)] for _ in range(20)])
    return ["--data-path", folder / "words", "--tokenizer", write_tokenizer(folder / "tokenizer", 5)]


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[object]]]:
    """trained(kind) -> (folder of checkpoints, flags of the model). tp 2 pads the 61 words."""

    @functools.cache
    def train(kind: str) -> tuple[Path, list[object]]:
        folder = tmp_path_factory.mktemp(kind) / "run"
        flags = [*SIZES, *KINDS[kind], *data]
        training = ["--train-iters", 2, "--tensor-model-parallel-size", 2, "--save", folder]
        done = pretrain(*flags, *training, ranks=2)
        assert done.returncode == 0, done.stderr
        return folder, flags

    return train


@pytest.fixture(params=by_default(KINDS, 0))
def run(request: pytest.FixtureRequest, trained) -> tuple[Path, list[object]]:
    return trained(request.param)


@pytest.fixture
def tied(trained) -> tuple[Path, list[object]]:
    return trained("tied")


def theirs(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()


def logits_of_ours(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """[b, s, v] of a checkpoint."""
    path = find(folder)
    assert path is not None
    mesh = Mesh.build(Layout(), 0, torch.device("cpu"))
    inference = InferenceModel(path, RunState.read(path).model_config(path), mesh)
    stage = inference.stage
    with torch.no_grad():
        tokens = MicroBatchInfo.of(ids, tuple(range(len(ids))), inference.stream, training=False)
        return stage.head.whole_logits(hidden_states(stage, ids, tokens)).view(*ids.shape, -1)


def assert_same_logits(found: torch.Tensor, folder: Path, ids: torch.Tensor) -> None:
    """found: [b, s, v] of transformers."""
    assert (found - logits_of_ours(folder, ids)).abs().max() < NEAR * found.abs().max()


def draw_ids(batch: int = 3) -> torch.Tensor:
    return torch.randint(0, WORDS, (batch, LENGTH), generator=torch.Generator().manual_seed(0))


def export(folder: Path, output: Path, **options: Any) -> Path:
    assert export_checkpoint(Export(folder, output, **options)) == 0
    return output


def import_(folder: Path, output: Path) -> Path:
    assert import_checkpoint(Import(folder, output)) == 0
    return output


def next_loss(flags: list[object], *more: object, log_dir: Path) -> float:
    done = pretrain(*flags, *more, "--train-iters", 1, "--log-dir", log_dir)
    assert done.returncode == 0, done.stderr
    return metrics(log_dir)[-1]["loss"]


def test_export_transformers_import_and_training_goes_on(run, tmp_path: Path) -> None:
    """The same logits in transformers, and after its own save and an import the same next loss, by another layout."""
    folder, flags = run
    model = theirs(export(folder, tmp_path / "export"))
    assert type(model).__name__ == "GPT2LMHeadModel" and model.dtype == torch.float32
    ids = draw_ids()
    with torch.no_grad():
        found = model(ids).logits
    assert_same_logits(found, folder, ids)
    assert model.config.vocab_size == WORDS  # without the padding of tp 2
    model.save_pretrained(tmp_path / "theirs", max_shard_size="10kB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 3
    back = import_(tmp_path / "theirs", tmp_path / "back")
    ours, original = read_checkpoint(back / "iter_0000000"), read_checkpoint(folder / "iter_0000002")
    assert set(ours) == {name for name in original if name.startswith("model.")}
    assert all(torch.equal(ours[name], original[name]) for name in ours)
    wanted = next_loss(flags, "--load", folder, "--finetune", log_dir=tmp_path / "a")
    goes_on = ["--load", back, "--train-iters", 1, "--log-dir", tmp_path / "b", "--save", back]
    done = pretrain(*flags, *goes_on, "--pipeline-model-parallel-size", 2, ranks=2)
    assert done.returncode == 0, done.stderr
    assert abs(metrics(tmp_path / "b")[0]["loss"] - wanted) < NEAR * wanted
    assert (back / "latest").read_text() == "iter_0000001\n"


@pytest.mark.second
def test_the_preset_of_an_import_has_its_flags(tied, tmp_path: Path) -> None:
    folder, flags = tied
    back = import_(export(folder, tmp_path / "export"), tmp_path / "back")
    training = ["--preset", back / "config.toml", "--load", back, "--finetune", *flags[-4:-2], "--global-batch-size", 4]
    wanted = next_loss(flags, "--load", folder, "--finetune", log_dir=tmp_path / "a")
    assert next_loss(training, log_dir=tmp_path / "b") == pytest.approx(wanted, rel=NEAR)


def test_a_model_of_theirs(tmp_path: Path, data) -> None:
    """Drawn by transformers, saved with the base model's names alone; its loss by --eval-only, on a whole split."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_positions": LENGTH, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "initializer_range": 0.3}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, **sizes)).eval()
    model.transformer.save_pretrained(tmp_path / "theirs")
    weights = load_file(tmp_path / "theirs" / "model.safetensors")
    assert "wte.weight" in weights
    weights |= {f"h.{i}.attn.bias": torch.ones(1, 1, LENGTH, LENGTH).tril() for i in range(LAYERS)}  # as in old files
    save_file(weights, tmp_path / "theirs" / "model.safetensors", {"format": "pt"})
    back = import_(tmp_path / "theirs", tmp_path / "back")
    ids = draw_ids()
    with torch.no_grad():
        assert_same_logits(model(ids).logits, back, ids)
    assert not (back / "tokenizer").exists() and "tokenizer" not in (back / "config.toml").read_text()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_weights_in_16_bit_and_in_several_files(dtype: str, tied, tmp_path: Path, capsys) -> None:
    folder, _ = tied
    output = export(folder, tmp_path / "export", dtype=dtype, max_shard_size=0.00002, tokenizer="none")
    printed = capsys.readouterr().out
    files = sorted(path.name for path in output.glob("*.safetensors"))
    index = json.loads((output / "model.safetensors.index.json").read_text())
    assert len(files) > 1 and sorted(set(index["weight_map"].values())) == files
    weights = {name: load_file(output / file)[name] for name, file in index["weight_map"].items()}
    total = index["metadata"]["total_size"]
    assert sum(w.nbytes for w in weights.values()) == total
    assert printed == f"wrote {output}: {size(total)} of {dtype} weights, of {folder / 'iter_0000002'}\n"
    model, wanted = theirs(output), theirs(export(folder, tmp_path / "fp32")).state_dict()
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    assert model.dtype == kind
    assert all(torch.equal(value, wanted[name].to(kind)) for name, value in model.state_dict().items())
    assert not list(output.glob("tokenizer*"))


def test_tokenizers(tied, tmp_path: Path) -> None:
    """The run's own, copied as it is; and one that transformers does not know, rebuilt."""
    from transformers import AutoTokenizer, GenerationConfig

    folder, flags = tied
    output = export(folder, tmp_path / "own")
    exported, given = (json.loads((at / "tokenizer.json").read_text()) for at in (output, Path(str(flags[-1]))))
    assert exported == given
    assert AutoTokenizer.from_pretrained(output)("w7 w3 w5")["input_ids"] == [7, 3, 0]  # w5 is the end of document
    assert GenerationConfig.from_pretrained(output).eos_token_id == theirs(output).config.eos_token_id == 5
    back = import_(output, tmp_path / "back")
    shutil.move(back, tmp_path / "moved")
    path = find(tmp_path / "moved")
    assert run_tokenizer(path, RunState.read(path)).identity == load_tokenizer(str(flags[-1])).identity


def test_special_tokens_that_the_tokenizer_names(tied, tmp_path: Path) -> None:
    """The beginning of a text and padding are not the end of a document."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    folder, _ = tied
    tokenizer = write_tokenizer(tmp_path / "tokenizer", 5)
    settings = {
        "bos_token": "w1",
        "pad_token": {"content": "w2", "__type": "AddedToken"},
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(settings))
    output = export(folder, tmp_path / "export", tokenizer=str(tokenizer))
    for found in (AutoTokenizer.from_pretrained(output), GenerationConfig.from_pretrained(output)):
        assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == (1, 5, 2)
    config = AutoConfig.from_pretrained(output)
    assert (config.bos_token_id, config.eos_token_id) == (1, 5)


@pytest.mark.second
def test_bytes_as_a_tokenizer_of_theirs(corpus: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    model = ["--num-layers", 1, "--hidden-size", 8, "--num-attention-heads", 1, "--seq-length", 8]
    done = pretrain(
        *model, "--train-iters", 1, "--data-path", corpus, "--tokenizer", "byte", "--save", tmp_path / "run"
    )
    assert done.returncode == 0, done.stderr
    output = export(tmp_path / "run", tmp_path / "export")
    tokenizer = AutoTokenizer.from_pretrained(output)
    assert tokenizer.eos_token_id == 256 and len(tokenizer) == 257
    for text in PROBE[:-1]:
        assert tokenizer(text)["input_ids"] == list(text.encode())
        assert tokenizer.decode(list(text.encode())) == text
    again = export(import_(output, tmp_path / "back"), tmp_path / "again")
    assert (again / "tokenizer.json").read_bytes() == (output / "tokenizer.json").read_bytes()


def damaged(folder: Path, change: str) -> None:
    """Make a folder of theirs one that is to be refused."""
    config, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    name = "transformer.h.1.mlp.c_fc.weight"
    if change == "other activation":
        config["activation_function"] = "quick_gelu"
    elif change == "other architecture":
        config["model_type"] = "bert"
    elif change == "more layers":
        config["n_layer"] += 1
    elif change == "fewer layers":
        config["n_layer"] -= 1
    elif change == "another shape":
        weights[name] = weights[name].t().contiguous()
    elif change == "quantised":
        weights[name] = weights[name].to(torch.int8)
    elif change == "not finite":
        weights[name][0, 0] = torch.nan
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    if change == "a larger tokenizer":
        shutil.rmtree(folder / "tokenizer", ignore_errors=True)
        write_tokenizer(folder / "new", 5, WORDS + 1)
        (folder / "new" / "tokenizer.json").replace(folder / "tokenizer.json")
    elif change == "a pickle":
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    elif change == "cut off":
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    elif change == "names a file elsewhere":
        index = {"weight_map": dict.fromkeys(weights, "../model.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    elif change == "names a tensor elsewhere":
        index = {"weight_map": dict.fromkeys(weights, "model.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        save_file({each: x for each, x in weights.items() if each != name}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("other activation", "config.json has activation_function quick_gelu; this version computes gelu, "),
        (
            "other architecture",
            "its model_type is 'bert', which has attention to later tokens; known are gpt2, llama, ",
        ),
        ("more layers", "missing transformer.h.3.ln_1.weight, transformer.h.3.ln_1.bias, .* and 9 more, unknown none"),
        ("fewer layers", "missing none, unknown transformer.h.2.attn.c_attn.bias, .* and 9 more"),
        (
            "another shape",
            r"h.1.mlp.c_fc.weight is \[40, 24\], and the model of config.json and the flags needs \[24, 40\]",
        ),
        ("quantised", "transformer.h.1.mlp.c_fc.weight is of int8, a quantised weight perhaps"),
        ("not finite", "blocks.1.mlp.up.weight holds values that are not finite"),
        ("a pickle", "found only pytorch_model.bin, a pickle, which could run code; save the model with"),
        ("cut off", "model.safetensors cannot be read: "),
        ("a larger tokenizer", "its tokenizer has 62 tokens, and its model 61"),
        (
            "names a tensor elsewhere",
            "model.safetensors has no transformer.h.1.mlp.c_fc.weight, which model.safetensors",
        ),
        ("names a file elsewhere", r"index.json: Expected `str` matching regex .* `\$.weight_map"),
    ],
)
def test_what_cannot_be_imported_is_refused(change: str, words: str, tied, tmp_path: Path) -> None:
    folder, _ = tied
    output = export(folder, tmp_path / "export")
    damaged(output, change)
    with pytest.raises(ValueError, match=words):
        import_(output, tmp_path / "back")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export"]


def test_an_export_appears_whole_or_not_at_all(tied, tmp_path: Path) -> None:
    folder, _ = tied
    shutil.copytree(folder, tmp_path / "run")
    export(folder, tmp_path / "there")
    with pytest.raises(ValueError, match="there exists already; name another folder"):
        export(folder, tmp_path / "there")
    file = next((tmp_path / "run" / "iter_0000002").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    data = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:data])
    content[data + next(entry["data_offsets"][1] for name, entry in header.items() if "model." in name) - 3] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match="does not match its checksum"):
        export(tmp_path / "run", tmp_path / "export")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "there"]


def test_an_architecture_without_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="--architecture parallel has no table that converts"):
        family_of(ModelConfig(**of_family("parallel"), add_qkv_bias=True))


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_options_choose_the_model_of_hugging_face(architecture: str) -> None:
    for bias, norms, wanted in ((False, False, "llama"), (True, False, "qwen2"), (False, True, "qwen3")):
        model = ModelConfig(**of_family(architecture), add_qkv_bias=bias, qk_layernorm=norms)
        assert family_of(model).model_type == wanted
    with pytest.raises(ValueError, match=r"^no model of Hugging Face is a (llama|qwen3) with --\S+"):
        family_of(ModelConfig(**of_family(architecture), add_qkv_bias=True, qk_layernorm=True))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kv_channels": 80}, "gpt2 with --kv-channels 80"),
        ({"architecture": "llama", "activation": "relu"}, "llama with --activation relu"),
        ({"residual_multiplier": 0.5, "window_size": 7}, "gpt2 with --window-size 7, --residual-multiplier 0.5"),
        ({"architecture": "granite", "final_softcap": 3.0}, "granite with --final-softcap 3.0"),
        ({"architecture": "mixtral", "num_experts": 4, "moe_layer_freq": "DE"}, "mixtral with --moe-layer-freq DE"),
        ({"architecture": "olmo2", "num_experts": 8} | OLMO2, "olmo2 with --num-experts 8"),
        (
            {"architecture": "llama", "norm_place": "around", "num_experts": 4},
            "llama with --norm-place around, --num-experts 4",
        ),
        ({"architecture": "olmo2", "qk_layernorm": False}, "olmo2 with --no-qk-layernorm, --no-qk-norm-all-heads"),
    ],
)
def test_a_model_that_no_class_computes_is_refused_by_its_flags(options: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=f"^no model of Hugging Face is a {named}"):
        family_of(ModelConfig(**with_traits(options)))


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, "mixtral"),
        ({"moe_ffn_hidden_size": 256, "moe_aux_loss_coeff": 0.01, "window_size": 5}, "mixtral"),
        ({"moe_router_pre_softmax": True, "qk_layernorm": True}, "qwen3_moe"),
        ({"moe_layer_freq": "DDDDDDDDDDDDE"}, "llama"),  # of its 12 layers none has experts
        ({"qk_layernorm": True, "qk_norm_all_heads": True}, "olmoe"),
        ({"qk_layernorm": True, "moe_layer_freq": "2"}, "qwen3_moe"),
        ({"add_qkv_bias": True, "moe_shared_expert_intermediate_size": 9, "moe_shared_expert_gate": True}, "qwen2_moe"),
    ],
)
def test_a_llama_with_experts_is_the_family_that_computes_it(options: dict[str, object], wanted: str) -> None:
    for architecture in ("llama", "mixtral"):
        model = ModelConfig(**of_family(architecture), num_experts=4, **options)  # type: ignore[arg-type]
        assert family_of(model).model_type == wanted


def test_values_that_are_the_usual_ones_are_no_difference() -> None:
    model = ModelConfig(kv_channels=64, num_query_groups=12, activation="gelu-tanh")
    assert family_of(model).to_config(model, None).n_head == 12


@pytest.mark.second
def test_values_beyond_fp16_are_refused(tied, tmp_path: Path) -> None:
    folder, _ = tied
    output = export(folder, tmp_path / "export")
    weights = load_file(output / "model.safetensors")
    weights["transformer.ln_f.bias"][0] = 1e5
    save_file(weights, output / "model.safetensors", {"format": "pt"})
    back = import_(output, tmp_path / "back")
    with pytest.raises(ValueError, match=r"--dtype fp16: head.norm.bias holds values beyond 65504.* use bf16 or fp32"):
        export(back, tmp_path / "half", dtype="fp16")


def test_bands_of_a_table_are_the_table(tied, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of a checkpoint of tp 2, and back."""
    folder, _ = tied
    whole = load_file(export(folder, tmp_path / "whole") / "model.safetensors")
    monkeypatch.setattr(streaming, "CHUNK_BYTES", 5 * 4 * HIDDEN)
    monkeypatch.setattr(streaming, "BAND_BYTES", 10 * 4 * HIDDEN)
    assert [len(range(*rows.indices(WORDS))) for rows in streaming.bands((WORDS, HIDDEN))] == [10] * 6 + [1]
    banded = load_file(export(folder, tmp_path / "banded") / "model.safetensors")
    again = load_file(export(import_(tmp_path / "banded", tmp_path / "back"), tmp_path / "again") / "model.safetensors")
    for name, tensor in whole.items():
        assert torch.equal(banded[name], tensor) and torch.equal(again[name], tensor), name
