"""Small models of all families: their options, each with a value that is no default."""

from dataclasses import replace
from typing import Any

from megazero.families import with_traits
from megazero.flags.config import ModelConfig

SCALED = {"rope_scaling_factor": 4.0, "rope_trained_length": 8}
NORMED = {"qk_layernorm": True, "kv_channels": 14}
OLMO = {"qk_layernorm": True, "qk_norm_all_heads": True, "num_query_groups": 2, "untie_embeddings": True}
EXPERTS = {"num_query_groups": 2, "num_experts": 6, "moe_router_topk": 3, "moe_ffn_hidden_size": 28}
EXPERTS |= {"moe_layer_freq": "EDE"}
GEMMA = {"num_query_groups": 2, "kv_channels": 14, "attention_scale": 1 / 3}
LATENT = {"multi_latent_attention": True, "q_lora_rank": 28, "kv_lora_rank": 20, "qk_head_dim": 10}
LATENT |= {"qk_pos_emb_head_dim": 6, "v_head_dim": 12, "rotary_interleaved": True, "untie_embeddings": True}
LOCAL = {"window_size": 4, "layer_pattern": "LLG"}

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {"num_query_groups": 2, "untie_embeddings": True, "rotary_base": 5e3} | SCALED,
    "mistral": {"num_query_groups": 2, "window_size": 5, "kv_channels": 14},
    "qwen2": {"num_query_groups": 2, "add_qkv_bias": True, "window_size": 6, "layer_pattern": "GL"},
    "qwen3": {"num_query_groups": 2, "rope_scaling_type": "yarn"} | NORMED | SCALED,
    "mixtral": {
        "num_query_groups": 2,
        "window_size": 5,
        "num_experts": 5,
        "moe_router_topk": 3,
        "untie_embeddings": True,
    },
    "qwen2-moe": EXPERTS
    | {"add_qkv_bias": True, "moe_shared_expert_intermediate_size": 20, "moe_shared_expert_gate": True}
    | {"window_size": 6, "layer_pattern": "GL", "moe_router_pre_softmax": True},
    "qwen3-moe": EXPERTS | NORMED | {"window_size": 6, "rotary_base": 5e3},
    "olmoe": OLMO | {"num_experts": 6, "moe_router_topk": 3, "moe_router_pre_softmax": True},
    "deepseek-v2": LATENT
    | {"q_lora_rank": 0, "v_head_dim": 16, "moe_router_pre_softmax": True}
    | {"num_experts": 6, "moe_router_topk": 3, "moe_ffn_hidden_size": 28, "moe_layer_freq": "DEEE"}
    | {"moe_shared_expert_intermediate_size": 56, "moe_router_topk_scaling_factor": 0.8},
    "deepseek-v3": LATENT
    | {"rope_scaling_type": "yarn", "mscale": 0.7, "mscale_all_dim": 1.2, **SCALED}
    | {"num_experts": 8, "moe_router_topk": 3, "moe_ffn_hidden_size": 28, "moe_layer_freq": "DEEE"}
    | {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_shared_expert_intermediate_size": 28}
    | {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    | {"moe_router_topk_scaling_factor": 1.5, "moe_router_bias_update_rate": 0.0},
    "glm4-moe": EXPERTS
    | {"moe_layer_freq": "DEEE", "add_qkv_bias": True, "qk_layernorm": True, "rotary_percent": 0.5, "kv_channels": 12}
    | {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "untie_embeddings": True}
    | {"moe_router_bias_update_rate": 0.0, "moe_router_topk_scaling_factor": 1.5}
    | {"moe_shared_expert_intermediate_size": 28},
    "gpt-oss": {"num_query_groups": 2, "kv_channels": 16, "window_size": 4, "layer_pattern": "LG", "rotary_base": 5e3}
    | {"num_experts": 6, "moe_router_topk": 3, "untie_embeddings": True}
    | {"rope_scaling_type": "yarn", "yarn_correction_range_round_to_int": False, **SCALED},
    "gemma": GEMMA | {"attention_scale": 0.0},
    "glm4": {"num_query_groups": 2, "rotary_percent": 0.5, "rotary_interleaved": True, "add_qkv_bias": True}
    | {"kv_channels": 12},
    "phi3": {"num_query_groups": 2, "window_size": 7, "rotary_percent": 0.5, "untie_embeddings": True},
    "smollm3": {"num_query_groups": 2, "layer_pattern": "GGN"},
    "granite": {
        "num_query_groups": 2,
        "attention_scale": 0.2,
        "residual_multiplier": 0.3,
        "embedding_multiplier": 3.0,
        "logits_divisor": 1.5,
    },
    "stablelm": {"num_query_groups": 2, "rotary_percent": 0.34, "add_qkv_bias": True},
    "olmo2": OLMO,
    "olmo3": OLMO | LOCAL | SCALED | {"rope_scaling_type": "yarn", "rotary_base": 5e3, "local_rotary_base": 3e3},
    "gemma2": GEMMA | LOCAL | {"attention_softcap": 1.5, "final_softcap": 2.5},
    "gemma3": GEMMA
    | LOCAL
    | {
        "qk_layernorm": True,
        "local_rotary_base": 3e3,
        "rope_scaling_type": "linear",
        "rope_scaling_factor": 8.0,
    },
    "gpt-neox": {"rotary_percent": 0.34, "untie_embeddings": True},
    "starcoder2": {"num_query_groups": 2, "window_size": 5, "rotary_base": 5e3},
    "gptj": {"rotary_percent": 0.5, "rotary_interleaved": True, "untie_embeddings": True},
}


def dense(name: str) -> dict[str, Any]:
    """Return the options of a family without experts."""
    return {option: v for option, v in FAMILIES[name].items() if option != "num_experts" and "moe_" not in option}


def family(name: str, model: ModelConfig) -> ModelConfig:
    """Return the model of a family with the sizes of `model`."""
    return replace(model, **of_family(name), **FAMILIES[name])


def of_family(name: str) -> dict[str, Any]:
    """Return the options that make a model one of a family: its traits, without its other defaults."""
    return with_traits({"architecture": name})
