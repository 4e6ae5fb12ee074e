"""All families between checkpoints of real runs and transformers: export, generation, import."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megazero.engine.plan.layout.topology import Layout
from megazero.flags.config import ModelConfig
from megazero.flags.flag_names import as_flag
from megazero.interop.huggingface.families import family_of
from tests.end_to_end.cli import metrics, pretrain
from tests.end_to_end.test_generate import on_a_rank, write_tokenizer
from tests.end_to_end.test_huggingface import assert_same_logits, export, import_, theirs
from tests.helpers.families import SMALL, family
from tests.helpers.ranks import Ranks
from tests.helpers.rounding import model_tolerance
from tests.reference_run import read_checkpoint, write_corpus

LENGTH, WORDS = 20, 61
SIZES = "--num-layers 3 --hidden-size 48 --ffn-hidden-size 40 --num-attention-heads 6".split()
SIZES += ["--seq-length", LENGTH, "--init-method-std", 0.2, "--global-batch-size", 4, "--lr", 1e-2]


def flags_of(name: str) -> str:
    """Return the flags of a small model of a family."""
    options = {"architecture": name, "norm_epsilon": 1e-4} | SMALL[name]
    if "moe_router_bias_update_rate" in options:
        options["moe_router_bias_update_rate"] = 0.3  # biases that choose other experts are exported, and imported
    return " ".join(as_flag(option.replace("_", "-"), value) for option, value in options.items())


LLAMA = "--architecture llama --num-query-groups"
KINDS = {name: (family_of(family(name, ModelConfig(num_layers=3))).model_class, flags_of(name)) for name in SMALL} | {
    "llama, one group, tied": ("LlamaForCausalLM", f"{LLAMA} 1 --no-untie-embeddings --rope-scaling-factor 8"),
    "llama, wide heads": ("LlamaForCausalLM", f"{LLAMA} 2 --kv-channels 12"),
    "llama with a window is mistral": ("MistralForCausalLM", f"{LLAMA} 2 --window-size 6"),
    "llama with windows in turns is ministral": (
        "MinistralForCausalLM",
        f"{LLAMA} 2 --window-size 4 --layer-pattern LG",
    ),
    "llama with biases is qwen2": ("Qwen2ForCausalLM", "--architecture llama --add-qkv-bias"),
    "llama with norms is qwen3": ("Qwen3ForCausalLM", f"{LLAMA} 1 --qk-layernorm --no-untie-embeddings"),
}
RINGS = dict.fromkeys(("gemma3", "gpt-neox"), pytest.mark.second)
NEAR = model_tolerance(ModelConfig(2, 48, 0, 6, LENGTH, WORDS), torch.float32)
PROMPTS = [[7], [7, 3, 55, 12], [60] * 9, [1, 2, 3]]


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=RINGS.get(kind, pytest.mark.slow)) for kind in KINDS])
def test_there_and_back(kind: str, tmp_path: Path, ranks: Callable[[int], Ranks]) -> None:
    """The same logits and likeliest tokens in transformers; after an import the same bits and the next loss.

    So is the loss that `--load` of the folder of transformers begins with, whose routers have biases.
    """
    model_class, options = KINDS[kind]
    draw = random.Random(0)
    write_corpus(tmp_path / "words", "<u2", [[draw.choices(range(WORDS), k=50)] for _ in range(20)])
    tokenizer = write_tokenizer(tmp_path / "tokenizer", 5)
    flags = [*SIZES, *options.split(), "--data-path", tmp_path / "words", "--tokenizer", tokenizer]
    training = ["--train-iters", 2, "--tensor-model-parallel-size", 2, "--save", tmp_path / "run"]
    done = pretrain(*flags, *training, ranks=2)
    assert done.returncode == 0, done.stderr

    model = theirs(export(tmp_path / "run", tmp_path / "export", max_shard_size=0.00002))
    assert type(model).__name__ == model_class
    ids = torch.randint(0, WORDS, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert_same_logits(model(ids).logits, tmp_path / "run", ids)

    wanted = []
    for number, prompt in enumerate(PROMPTS):
        whole = model.generate(
            torch.tensor([prompt]), max_new_tokens=9, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        wanted.append((number, whole[0, len(prompt) :].tolist()))
    path = tmp_path / "run" / "iter_0000002"
    for layout in (Layout(tp=2), Layout(pp=2)):
        assert ranks(2).run(on_a_rank, path, layout, PROMPTS)[0] == wanted

    model.save_pretrained(tmp_path / "theirs")
    back = import_(tmp_path / "theirs", tmp_path / "back")
    ours, original = read_checkpoint(back / "iter_0000000"), read_checkpoint(path)
    assert all(torch.equal(ours[name], value) for name, value in original.items() if name.startswith("model."))
    preset = ["--preset", back / "config.toml", "--tokenizer", tokenizer, "--data-path", tmp_path / "words"]
    losses = []
    of_folder = [*preset[2:], "--seq-length", LENGTH, "--load", tmp_path / "theirs"]
    begins = {"a": [*flags, "--load", tmp_path / "run", "--finetune"], "b": [*preset, "--load", back, "--finetune"]}
    for name, begin in (begins | {"c": of_folder}).items():
        one = ["--train-iters", 1, "--global-batch-size", 4, "--log-dir", tmp_path / name]
        done = pretrain(*begin, *one)
        assert done.returncode == 0, done.stderr
        losses.append(metrics(tmp_path / name)[0]["loss"])
    assert max(losses) - min(losses) < NEAR * losses[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"hidden_act": "gelu"},
            "config.json has hidden_act gelu; this version computes silu, swish, gelu_pytorch_tanh, .* only",
        ),
        ({"hidden_act": "relu2"}, "config.json has hidden_act relu2; this version computes silu, "),
        ({"attention_bias": True}, "config.json has attention_bias True"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
            "has rope_type dynamic; this version computes default, linear, llama3, yarn only",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 0.0}},
            "config.json has factor 0 in rope_parameters; a context is stretched by at least 1",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_slow": 2}},
            "config.json has beta_slow 2 in rope_parameters of rope_type yarn",
        ),
    ],
)
def test_what_ours_does_not_compute_is_refused(change: dict[str, object], words: str, tmp_path: Path) -> None:
    from transformers import LlamaConfig

    LlamaConfig(hidden_size=48, num_attention_heads=6, num_key_value_heads=2).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=words):
        import_(tmp_path, tmp_path / "back")
