"""config.json as the model: every key of every family is read, or refused by key and value."""

import json
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megazero.families import MODELS
from megazero.flags.config import ModelConfig
from megazero.interop.huggingface.configuration import HARMLESS, read_config
from megazero.interop.huggingface.families import family_of
from tests.helpers.table import for_each

SMALL = {
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 61,
    "max_position_embeddings": 20,
    **{"intermediate_size": 40, "moe_intermediate_size": 28, "shared_expert_intermediate_size": 20},
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 16),
}
DERIVED = dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim"), ("qk_head_dim",))  # keys -> others that repeat them
OVERWRITTEN = {"deepseek_v2": {"head_dim"}}  # keys whose values in a file transformers' class replaces
PLANTED = {  # keys that ask for other weights or layers, and misspelled ones
    "quantization_config": {"quant_method": "gptq", "bits": 4},
    "per_layer_config": {"0": {"hidden_act": "relu"}},
    "tie_word_embedding": True,
}
NOTED = {"unsloth_version": "2024.9", "unsloth_fixed": True, "moe_num_experts": 8, "an_option_of_next_year": "wide"}


def written(folder: Path, model_type: str, **changes: Any) -> Path:
    """Write the config.json of a small model of theirs, with changes; returns the file."""
    from transformers import AutoConfig

    known = AutoConfig.for_model(model_type)
    sizes = {key: size for key, size in SMALL.items() if hasattr(known, key)}
    if hasattr(known, "kv_lora_rank"):  # each of its heads has keys of its own
        sizes |= {"num_key_value_heads": 6, "num_experts_per_tok": 3}
    others = {"first_k_dense_replace": 1, "num_nextn_predict_layers": 0, "rotary_dim": 4}
    others |= {"head_dim": 8} if model_type == "helium" else {}  # its model has no other
    sizes |= {key: value for key, value in others.items() if hasattr(known, key)}
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
    architecture, model, notes = read_config(written(tmp_path, model_type))
    assert (architecture, model, []) == read_config(tmp_path) and architecture.model_type == model_type and not notes
    assert (model.hidden_size, model.num_attention_heads, model.num_layers) == (48, 6, 2)
    assert (model.vocab_size, model.seq_length) == (61, 20)


@for_each("model_type", MODELS)
def test_every_key_changes_the_model_or_is_refused_by_its_name(model_type: str, tmp_path: Path) -> None:
    """Each key of the class in turn, with another value; a note names those without an effect, or HARMLESS has them."""
    file = written(tmp_path, model_type)
    architecture = MODELS[model_type]
    keys = dict.fromkeys(architecture.ignored, 1) | json.loads(file.read_text())
    file.write_text(json.dumps(keys))
    model = read_config(file).model
    ignored = set()
    for key in keys.keys() - HARMLESS:
        file.write_text(json.dumps(keys | {key: another(keys[key])}))
        try:
            found = read_config(file)
            changed = found.model != model or any(f" {key} " in note for note in found.notes)
        except ValueError as error:
            changed = bool({key, "model_type", *DERIVED.get(key, ())} & set(re.findall(r"\w+", str(error))))
        if not changed and another(keys[key]) != keys[key]:
            ignored.add(key)
    assert not ignored - OVERWRITTEN.get(model_type, set())


@for_each("model_type", MODELS)
@for_each("key", PLANTED)
def test_a_planted_key_is_refused_by_name_and_value(model_type: str, key: str, tmp_path: Path) -> None:
    file = written(tmp_path, model_type, **{key: PLANTED[key]})
    with pytest.raises(ValueError, match=rf"--hf-config .*config.json: .*{key}") as refusal:
        read_config(file, "--hf-config")
    assert str(PLANTED[key])[:40] in str(refusal.value)


TRIED = ("llama", "gpt2", "ministral", "deepseek_v3", "starcoder2")


@pytest.mark.parametrize("types", [TRIED, pytest.param(MODELS.keys() - set(TRIED), marks=pytest.mark.second)])
def test_keys_that_transformers_ignores_are_one_line(types: Collection[str], tmp_path: Path) -> None:
    """Also a head_dim that is the usual one, of which there is no line."""
    for model_type in sorted(types):
        plain = {"head_dim": 8} if model_type in ("qwen2", "gpt_neox", "stablelm", "gpt2", "starcoder2") else {}
        found = read_config(written(tmp_path, model_type, **NOTED, **plain))
        (note,) = found.notes
        assert all(f"{key} {value}" in note for key, value in NOTED.items()) and "head_dim" not in note
        assert f"transformers' {MODELS[model_type].model_class} ignores such keys (small models with" in note
        assert found.model == read_config(written(tmp_path, model_type)).model


@for_each("model_type", MODELS)
def test_harmless_keys_change_nothing(model_type: str, tmp_path: Path) -> None:
    model = read_config(written(tmp_path, model_type)).model
    more = {"torch_dtype": "bfloat16", "use_cache": False, "eos_token_id": [3, 4], "_name_or_path": "x/y"}
    more |= {"id2label": {"0": "good"}, "quantization_config": None, "rope_interleaved": False, "temperature": 0.6}
    more |= {"auto_map": {"AutoModelForCausalLM": "modeling_mine.Mine"}}  # transformers runs no such code by itself
    found = read_config(written(tmp_path, model_type, **more))
    assert found.model == model
    (note,) = found.notes
    assert f"auto_map {more['auto_map']}; transformers' {MODELS[model_type].model_class} ignores it, and so" in note


# Keys that may be null -> the value that null stands for in `SMALL`
NULL: dict[str, Any] = {"head_dim": 8, "num_key_value_heads": 6, "n_inner": 192}


@pytest.mark.second
@for_each("model_type", MODELS)
def test_null_stands_for_the_usual_value(model_type: str, tmp_path: Path) -> None:
    """Null keys that transformers accepts are accepted; others are refused by name."""
    keys = json.loads(written(tmp_path, model_type).read_text())
    for key in NULL.keys() & keys.keys() - ({"head_dim"} if "kv_lora_rank" in keys else set()):  # it is another width
        try:
            found = read_config(written(tmp_path, model_type, **{key: None})).model
        except ValueError as error:
            assert key in str(error)
            continue
        assert found == read_config(written(tmp_path, model_type, **{key: NULL[key]})).model, key


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
        ("mixtral", {"router_jitter_noise": 0.01}, "router_jitter_noise 0.01; this version does not compute it"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv 8.0; this version does not compute it"),
        ("olmoe", {"sliding_window": 7}, "sliding_window 7; this version does not compute it"),
        ("qwen3_moe", {"mlp_only_layers": [0, 1]}, r"mlp_only_layers \[0, 1\]; no layer has experts"),
        ("qwen2_moe", {"decoder_sparse_step": 4}, "decoder_sparse_step 4 and .* no layer has experts"),
        ("qwen2_moe", {"num_experts": 0}, "num_experts 0, .* no layer has experts"),
        ("llama", {"rope_tetha": 5e5}, "rope_tetha 500000.0; .*: did you mean rope_theta"),
        ("gpt_neox", {"head_dim": 12}, "head_dim 12; this version does not compute it"),
        (
            "deepseek_v3",
            {"head_dim": 8},
            "head_dim 8; .* a small DeepseekV3ForCausalLM with it cannot be run: The size",
        ),
        ("olmoe", {"head_dim": 12}, "head_dim 12; .* a small OlmoeForCausalLM with it cannot be run: The size"),
        ("helium", {"head_dim": 12}, "head_dim 12; transformers' model has heads of hidden_size / num_attention_heads"),
        (
            "gpt2",
            {"scale_attn_weights": True, "reorder_and_upcast_attn": True, "n_routed_experts": 8},
            "has reorder_and_upcast_attn True; this version does not compute it: it changes the model; docs/extending",
        ),
        ("llama", {"quantization_config": {"bits": 4}}, "compute it: load a folder with the dequantised weights"),
        (
            "gpt_oss",
            {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}},
            r"has quantization_config .*mxfp4.*; .* in bf16 \(of MXFP4: .* Mxfp4Config\(dequantize=True\), and",
        ),
        ("gpt_oss", {"swiglu_limit": 5.0}, "has swiglu_limit 5.0; this version computes 7.0 only"),
        *(  # transformers stops at these, or masks every token
            (
                kind,
                {"use_sliding_window": False, "layer_types": ["full_attention", "sliding_attention"]},
                "no window: sl",
            )
            for kind in ("qwen2", "qwen3", "qwen2_moe")
        ),
        ("olmo3", {"sliding_window": None}, "sliding_attention in layer_types and no window: sliding_window None"),
    ],
)
def test_refusals(model_type: str, change: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        read_config(written(tmp_path, model_type, **change))


# Keys as files have them, in short: many of their values are the defaults of transformers' classes.
IN_SHORT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "phi-4": (
        {"model_type": "phi3", "max_position_embeddings": 16384, "original_max_position_embeddings": 16384}
        | {"rope_theta": 250000, "sliding_window": None},
        {"rotary_base": 250000.0, "window_size": 0, "seq_length": 16384},
    ),
    "qwen3-moe, dense layers": (
        {"model_type": "qwen3_moe", "num_hidden_layers": 8, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
        {"moe_layer_freq": "DEDDDE", "moe_router_pre_softmax": True, "expert_size": 768},
    ),
    "qwen3-moe, every third layer": (
        {"model_type": "qwen3_moe", "num_hidden_layers": 8, "decoder_sparse_step": 3, "use_sliding_window": True},
        {"moe_layer_freq": "DDE", "window_size": 4096, "layer_pattern": ""},
    ),
    "starcoder2-3b": (
        {"model_type": "starcoder2", "mlp_type": "default", "norm_type": "layer_norm", "sliding_window": 4096}
        | {"embedding_dropout": 0.1, "residual_dropout": 0.1, "rope_theta": 999999.4420358813, "use_bias": True},
        {"window_size": 4096, "hidden_dropout": 0.1, "rotary_base": 999999.4420358813, "untie_embeddings": False},
    ),
}


@for_each("name", IN_SHORT)
def test_keys_with_the_value_of_the_class_are_read(name: str, tmp_path: Path) -> None:
    keys, options = IN_SHORT[name]
    (tmp_path / "config.json").write_text(json.dumps(keys))
    model = read_config(tmp_path)[1]
    assert {option: getattr(model, option) for option in options} == options


@for_each("model_type", ["mistral", "phi3", "mixtral", "qwen3_moe"])
def test_classes_without_kinds_of_layers_refuse_them(model_type: str, tmp_path: Path) -> None:
    """transformers' model ignores the key: all layers have the window."""
    kinds = ["full_attention", "sliding_attention"]
    with pytest.raises(ValueError, match=r"config\.json has layer_types \['full_attention"):
        read_config(written(tmp_path, model_type, sliding_window=7, layer_types=kinds))


REFUSED_TYPES = (
    ({"model_type": "seed_oss"}, "'seed_oss'; known are gpt2, .* docs/extending.md shows"),
    ({"model_type": "nemotron"}, "'nemotron', which has LayerNorms that add 1 to their weights"),
    ({"model_type": "minicpm3"}, "'minicpm3', which has LongRoPE positions; .* docs/extending.md shows"),
    ({"model_type": "a_type_of_next_year"}, "'a_type_of_next_year'; known are gpt2, .* docs/extending.md shows"),
    ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, "its text_config is a gemma3_text, which"),
)


def test_gemma_3_has_no_cap_of_attention_scores(tmp_path: Path) -> None:
    """transformers' class has the key, and its attention does not use it."""
    given = read_config(written(tmp_path, "gemma3_text", attn_logit_softcapping=50.0))
    assert given.model == read_config(written(tmp_path, "gemma3_text")).model and given.model.attention_softcap == 0
    assert "attn_logit_softcapping 50.0; transformers' Gemma3ForCausalLM ignores it, and so" in given.notes[0]
    with pytest.raises(ValueError, match="no model of Hugging Face is a gemma3_text with --attention-softcap 50"):
        family_of(replace(given.model, attention_softcap=50.0))


def test_missing_files_and_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"--hf-config openai/gpt2: no such .* hf download openai/gpt2"):
        read_config(Path("openai/gpt2"), "--hf-config")
    with pytest.raises(ValueError, match=r"it has no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds a JSON list, not an object"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ValueError, match=r"'bert', which has attention to later tokens; known are gpt2, llama, "):
        read_config(tmp_path)
    for keys, words in REFUSED_TYPES:
        (tmp_path / "config.json").write_text(json.dumps(keys))
        with pytest.raises(ValueError, match=words):
            read_config(tmp_path)
    written(tmp_path, "llama")
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ValueError, match=r"--hf-config .*: needs the Python package transformers.*pip install tr"):
        read_config(tmp_path, "--hf-config")


def test_the_defaults_of_a_model_are_none_of_ours(tmp_path: Path) -> None:
    """GPT-2 of transformers has dropout; ours has none."""
    model = read_config(written(tmp_path, "gpt2")).model
    assert model.hidden_dropout == model.attention_dropout == 0.1 != ModelConfig().hidden_dropout
