"""config.json as the model: every key of every family is read, or refused by key and value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megazero.config.schema import ModelConfig
from megazero.huggingface.configuration import HARMLESS, read_config
from megazero.huggingface.families import MODELS
from tests.helpers.table import for_each

SMALL = {
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 61,
    "max_position_embeddings": 20,
}
PLANTED = {  # keys that no class has, or that ask for code
    "quantization_config": {"quant_method": "gptq", "bits": 4},
    "n_routed_experts": 8,
    "auto_map": {"AutoModelForCausalLM": "modeling_mine.Mine"},
    "rope_interleaved": True,
    "an_option_of_next_year": "wide",
    "per_layer_config": {"0": {"hidden_act": "relu"}},
}


def written(folder: Path, model_type: str, **changes: Any) -> Path:
    """Write the config.json of a small model of theirs, with changes; returns the file."""
    from transformers import AutoConfig

    known = AutoConfig.for_model(model_type)
    sizes = {key: size for key, size in SMALL.items() if hasattr(known, key)}
    windows = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    sizes |= windows if model_type.startswith("qwen") else {}
    AutoConfig.for_model(model_type, **sizes).save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return file


def another(value: Any) -> Any:
    """Return another value of the same type, if it has one."""
    if value is None or isinstance(value, bool):
        return not value
    if isinstance(value, float):
        return value / 2 or 0.5
    if isinstance(value, int):
        return value * 2 or 1
    return f"{value}_other" if isinstance(value, str) else value


@pytest.mark.long
@for_each("model_type", MODELS)
def test_a_file_and_its_folder_are_the_same_model(model_type: str, tmp_path: Path) -> None:
    architecture, model = read_config(written(tmp_path, model_type))
    assert (architecture, model) == read_config(tmp_path) and architecture.model_type == model_type
    assert (model.hidden_size, model.num_attention_heads, model.num_layers) == (48, 6, 2)
    assert (model.vocab_size, model.seq_length) == (61, 20)


@for_each("model_type", MODELS)
def test_every_key_changes_the_model_or_is_refused_by_its_name(model_type: str, tmp_path: Path) -> None:
    """Each key of the class in turn, with another value; those without an effect are in HARMLESS."""
    file = written(tmp_path, model_type)
    keys = json.loads(file.read_text())
    _, model = read_config(file)
    ignored = set()
    for key in keys.keys() - HARMLESS:
        file.write_text(json.dumps(keys | {key: another(keys[key])}))
        try:
            changed = read_config(file)[1] != model
        except ValueError as error:
            changed = key in str(error) or "model_type" in str(error)
        if not changed and another(keys[key]) != keys[key]:
            ignored.add(key)
    assert not ignored


@for_each("model_type", MODELS)
@for_each("key", PLANTED)
def test_a_planted_key_is_refused_by_name_and_value(model_type: str, key: str, tmp_path: Path) -> None:
    file = written(tmp_path, model_type, **{key: PLANTED[key]})
    with pytest.raises(ValueError, match=rf"--hf-config .*config.json: .*{key}") as refusal:
        read_config(file, "--hf-config")
    assert str(PLANTED[key])[:40] in str(refusal.value)


@for_each("model_type", MODELS)
def test_harmless_keys_change_nothing(model_type: str, tmp_path: Path) -> None:
    _, model = read_config(written(tmp_path, model_type))
    more = {"torch_dtype": "bfloat16", "use_cache": False, "eos_token_id": [3, 4], "_name_or_path": "x/y"}
    more |= {"id2label": {"0": "good"}, "quantization_config": None, "rope_interleaved": False, "temperature": 0.6}
    assert read_config(written(tmp_path, model_type, **more))[1] == model


@for_each(
    ("model_type", "change", "words"),
    [
        ("smollm3", {"use_sliding_window": True}, "use_sliding_window True"),
        ("gpt2", {"embd_pdrop": 0.3}, "embd_pdrop 0.3 and resid_pdrop 0.1; this version computes equal ones only"),
        ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn True; this version does not compute it"),
        ("starcoder2", {"embedding_dropout": 0.3}, "embedding_dropout 0.3 and residual_dropout 0.0; this version"),
        ("starcoder2", {"use_bias": False}, "use_bias False; this version computes True only"),
        ("starcoder2", {"norm_type": "rms_norm"}, "norm_type rms_norm; this version computes layer_norm only"),
        ("llama", {"is_decoder": True, "mlp_bias": True}, "mlp_bias True"),
        ("llama", {"hidden_size": "wide"}, "hidden_size"),
        ("llama", {"num_experts": 4, "expert_bias": 1}, "expert_bias 1, num_experts 4; this version does"),
        ("mixtral", {"router_jitter_noise": 0.01}, "router_jitter_noise 0.01; this version does not compute it"),
        ("mixtral", {"norm_topk_prob": False}, "norm_topk_prob False; this version does not compute it"),
        ("mixtral", {"moe_intermediate_size": 64}, "moe_intermediate_size 64; this version does not compute it"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv 8.0; this version does not compute it"),
        ("olmoe", {"sliding_window": 7}, "sliding_window 7; this version does not compute it"),
        ("qwen3_moe", {"mlp_only_layers": [0, 1]}, r"mlp_only_layers \[0, 1\]; no layer has experts"),
        ("qwen2_moe", {"decoder_sparse_step": 4}, "decoder_sparse_step 4 and .* no layer has experts"),
        ("qwen2_moe", {"num_experts": 0}, "num_experts 0, .* no layer has experts"),
        ("qwen2_moe", {"first_k_dense_replace": 1}, "first_k_dense_replace 1; this version does not compute it"),
    ],
)
def test_refusals(model_type: str, change: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        read_config(written(tmp_path, model_type, **change))


def test_published_files_of_older_versions_are_read(tmp_path: Path) -> None:
    """Keys as the hub has them: SmolLM-135M (written from memory), and Qwen2.5's windows that are switched off."""
    smol = {
        **{"architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0},
        **{"eos_token_id": 0, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664},
        **{"intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False},
        **{"model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3},
        **{"pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None},
        **{"rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "float32", "vocab_size": 49152},
        **{"transformers_version": "4.55.0.dev0", "use_cache": True, "transformers.js_config": {"dtype": "q4"}},
    }
    (tmp_path / "config.json").write_text(json.dumps(smol))
    _, model = read_config(tmp_path)
    assert model.rotary_base == 1e5 and model.num_query_groups == 3 and not model.untie_embeddings
    windows = {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 21}
    assert read_config(written(tmp_path, "qwen2", **windows))[1].window_size == 0


# Keys as the hub has them, in short: many of their values are the defaults of transformers' classes.
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "pythia": (
        {"model_type": "gpt_neox", "rotary_emb_base": 10000, "rotary_pct": 0.25, "use_parallel_residual": True},
        {"rotary_base": 1e4, "rotary_percent": 0.25},
    ),
    "mistral-7b": (
        {"model_type": "mistral", "sliding_window": 4096, "rope_theta": 10000.0},
        {"window_size": 4096, "layer_pattern": "", "rotary_base": 1e4},
    ),
    "phi-4": (
        {"model_type": "phi3", "max_position_embeddings": 16384, "original_max_position_embeddings": 16384}
        | {"rope_theta": 250000, "sliding_window": None},
        {"rotary_base": 250000.0, "window_size": 0, "seq_length": 16384},
    ),
    "qwen2.5": (
        {"model_type": "qwen2", "use_mrope": False, "use_sliding_window": False, "max_window_layers": 21},
        {"window_size": 0},
    ),
    "gemma-2": (
        {"model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
        | {"rope_theta": 10000.0, "sliding_window": 4096, "query_pre_attn_scalar": 256},
        {"window_size": 4096, "layer_pattern": "LG", "attention_scale": 0.0},
    ),
    "gemma-3": (
        {"model_type": "gemma3_text", "rope_theta": 1000000, "rope_local_base_freq": 10000, "sliding_window": 512}
        | {"sliding_window_pattern": 6, "num_hidden_layers": 26},
        {"window_size": 512, "layer_pattern": "LLLLLG", "rotary_base": 1e6, "local_rotary_base": 1e4},
    ),
    "mixtral-8x7b": (
        {"model_type": "mixtral", "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2}
        | {"output_router_logits": False, "router_aux_loss_coef": 0.02, "sliding_window": None, "rope_theta": 1e6},
        {"num_experts": 8, "moe_router_topk": 2, "expert_size": 14336, "moe_router_pre_softmax": False}
        | {"moe_layer_freq": "1", "moe_aux_loss_coeff": 0.0, "window_size": 0, "rotary_base": 1e6},
    ),
    "qwen1.5-moe": (
        {"model_type": "qwen2_moe", "decoder_sparse_step": 1, "moe_intermediate_size": 1408, "num_experts": 60}
        | {"shared_expert_intermediate_size": 5632, "norm_topk_prob": False, "max_window_layers": 21}
        | {"use_sliding_window": False, "sliding_window": 32768, "rope_theta": 1e6},
        {"num_experts": 60, "moe_router_topk": 4, "expert_size": 1408, "moe_shared_expert_intermediate_size": 5632}
        | {"moe_router_pre_softmax": True, "moe_shared_expert_gate": True, "add_qkv_bias": True, "window_size": 0},
    ),
    "qwen3-30b-a3b": (
        {"model_type": "qwen3_moe", "decoder_sparse_step": 1, "head_dim": 128, "mlp_only_layers": []}
        | {"moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8}
        | {"max_window_layers": 48, "sliding_window": None, "use_sliding_window": False, "rope_theta": 1e6},
        {"num_experts": 128, "moe_router_topk": 8, "expert_size": 768, "ffn_hidden_size": 6144, "head_dim": 128}
        | {"moe_router_pre_softmax": False, "moe_layer_freq": "1", "window_size": 0},
    ),
    "qwen3-moe, dense layers": (
        {"model_type": "qwen3_moe", "num_hidden_layers": 8, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
        {"moe_layer_freq": "DEDDDE", "moe_router_pre_softmax": True, "expert_size": 768},
    ),
    "qwen3-moe, every third layer": (
        {"model_type": "qwen3_moe", "num_hidden_layers": 8, "decoder_sparse_step": 3, "use_sliding_window": True},
        {"moe_layer_freq": "DDE", "window_size": 4096, "layer_pattern": ""},
    ),
    "olmoe-1b-7b": (
        {"model_type": "olmoe", "clip_qkv": None, "intermediate_size": 1024, "norm_topk_prob": False}
        | {"num_experts": 64, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.01, "rope_scaling": None},
        {"num_experts": 64, "moe_router_topk": 8, "expert_size": 1024, "moe_router_pre_softmax": True}
        | {"qk_layernorm": True, "qk_norm_all_heads": True, "rotary_base": 1e4},
    ),
    "starcoder2-3b": (
        {"model_type": "starcoder2", "mlp_type": "default", "norm_type": "layer_norm", "sliding_window": 4096}
        | {"embedding_dropout": 0.1, "residual_dropout": 0.1, "rope_theta": 999999.4420358813, "use_bias": True},
        {"window_size": 4096, "hidden_dropout": 0.1, "rotary_base": 999999.4420358813, "untie_embeddings": False},
    ),
}


@for_each("name", PUBLISHED)
def test_keys_with_the_value_of_the_class_are_read(name: str, tmp_path: Path) -> None:
    keys, options = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(keys))
    model = read_config(tmp_path)[1]
    assert {option: getattr(model, option) for option in options} == options


@for_each("model_type", ["mistral", "phi3", "mixtral", "qwen3_moe"])
def test_classes_without_kinds_of_layers_refuse_them(model_type: str, tmp_path: Path) -> None:
    """transformers' model ignores the key: all layers have the window."""
    kinds = ["full_attention", "sliding_attention"]
    with pytest.raises(ValueError, match=r"config\.json has layer_types \['full_attention"):
        read_config(written(tmp_path, model_type, sliding_window=7, layer_types=kinds))


def test_missing_files_and_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"--hf-config openai/gpt2: no such .* hf download openai/gpt2"):
        read_config(Path("openai/gpt2"), "--hf-config")
    with pytest.raises(ValueError, match=r"it has no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds a JSON list, not an object"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match=r"its model_type is 'bert'; known are gpt2, .*, llama, "):
        read_config(tmp_path)
    written(tmp_path, "llama")
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ValueError, match=r"--hf-config .*: needs the Python package transformers.*megazero\[hf\]"):
        read_config(tmp_path, "--hf-config")


def test_the_defaults_of_a_model_are_none_of_ours(tmp_path: Path) -> None:
    """GPT-2 of transformers has dropout; ours has none."""
    _, model = read_config(written(tmp_path, "gpt2"))
    assert model.hidden_dropout == model.attention_dropout == 0.1 != ModelConfig().hidden_dropout
