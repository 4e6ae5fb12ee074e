"""Options and rows that several families share: those of Llama, Gemma, OLMo, GLM and DeepSeek.

Shapes are those of `model_types`.
"""

from collections.abc import Mapping
from typing import Any

from megazero.families.parts.model_types import GATED_ACTIVATIONS, Conversion, HuggingFaceModel, Options
from megazero.families.parts.rope_scaling import ROTARY
from megazero.families.parts.tensor_names import (
    AFTER,
    AROUND,
    ATTENTION,
    BEFORE,
    EXPERTS,
    EXPERTS_IN_MEMORY,
    GATED_MLP,
    LATENT_ATTENTION,
    LLAMA_OUTSIDE,
    PREDICTIONS,
    SHARED_EXPERTS_LAYERS,
    Names,
    tensor_rows,
)
from megazero.families.parts.weight_conversions import LATENT_HEADS, SHARED_EXPERTS

# -- options of families

ROTATED: Options = {"fused_qkv": False, "learned_positions": False}
ROOT_MEAN: Options = ROTATED | {"norm": "rmsnorm", "activation": "swiglu", "linear_biases": ()}
LLAMA: Options = ROOT_MEAN | {"untie_embeddings": True, "norm_epsilon": 1e-6}
OLMO2: Options = LLAMA | {"norm_place": "after", "rotary_base": 5e5, "qk_layernorm": True, "qk_norm_all_heads": True}
GEMMA: Options = ROTATED | {"norm": "rmsnorm-1p", "activation": "geglu-tanh", "linear_biases": ()}
GEMMA |= {"root_embedding": True, "norm_epsilon": 1e-6, "kv_channels": 256}
DEEPSEEK: Options = LLAMA | {"multi_latent_attention": True, "rotary_interleaved": True}
SIGMOID: Options = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
SIDE_BY_SIDE: Options = ROTATED | {"parallel_norms": 1, "linear_biases": ("mlp",)}  # of GPT-J

# -- options of small models for tests

SMALL_GROUPS: Options = {"num_query_groups": 2}
SMALL_SCALING: Options = {"rope_scaling_factor": 4.0, "rope_trained_length": 8}
SMALL_NORMS: Options = {"qk_layernorm": True, "kv_channels": 14}
SMALL_WINDOWS: Options = {"window_size": 4, "layer_pattern": "LLG"}
SMALL_EXPERTS: Options = SMALL_GROUPS | {"num_experts": 6, "moe_router_topk": 3, "moe_ffn_hidden_size": 28}
SMALL_EXPERTS |= {"moe_layer_freq": "EDE"}
SMALL_OLMO: Options = SMALL_GROUPS | {"qk_layernorm": True, "qk_norm_all_heads": True, "untie_embeddings": True}
SMALL_GEMMA: Options = SMALL_GROUPS | {"kv_channels": 14, "attention_scale": 1 / 3}
SMALL_LATENTS: Options = {
    **{"multi_latent_attention": True, "q_lora_rank": 28, "kv_lora_rank": 20, "qk_head_dim": 10},
    **{"qk_pos_emb_head_dim": 6, "v_head_dim": 12, "rotary_interleaved": True, "untie_embeddings": True},
}
SMALL_DEEPSEEK: Options = SMALL_LATENTS | {"moe_router_topk": 3, "moe_ffn_hidden_size": 28, "moe_layer_freq": "DEEE"}

# -- rows in transformers

LLAMA_OPTIONS = {
    "vocab_size": "vocab_size",
    "seq_length": "max_position_embeddings",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "ffn_hidden_size": "intermediate_size",
    "norm_epsilon": "rms_norm_eps",
    "attention_dropout": "attention_dropout",
    "init_method_std": "initializer_range",
}
NO_BIASES = {"attention_bias": (False,), "mlp_bias": (False,)}
GEMMA_REQUIRED = NO_BIASES | {"use_bidirectional_attention": (None, False)}
ROUTED = {"num_experts": "num_experts", "moe_router_topk": "num_experts_per_tok"}
ROUTED_AND_DENSE = ROUTED | {"moe_ffn_hidden_size": "moe_intermediate_size"}
ROUTED_BY_SIGMOID = ROUTED_AND_DENSE | {
    "num_experts": "n_routed_experts",
    "moe_router_topk_scaling_factor": "routed_scaling_factor",
}
EXPERT_BIAS = "model.layers.{}.mlp.gate.e_score_correction_bias"


def llama_row(
    model_type: str,
    model_class: str,
    *conversions: Conversion,
    layers: Names = BEFORE | ATTENTION | GATED_MLP,
    options: dict[str, str] | None = None,
    required: dict[str, tuple[Any, ...]] = NO_BIASES,
    kinds: str = "GL",
    activations: Mapping[str, tuple[str, ...]] = GATED_ACTIVATIONS,
    **others: Any,
) -> HuggingFaceModel:
    """Return the row of a relative of Llama.

    Args:
        layers: names of the tensors in blocks.
        options: besides Llama's; see `HuggingFaceModel`.
        others: further fields of it.
    """
    return HuggingFaceModel(
        model_type=model_type,
        model_class=model_class,
        prefix="model.",
        tensors=tensor_rows(LLAMA_OUTSIDE, "model.layers.{}.", layers, EXPERTS_IN_MEMORY),
        options=LLAMA_OPTIONS | (options or {}),
        conversions=conversions,
        required=required,
        kinds=kinds,
        activations=activations,
        buffers=(".rotary_emb.inv_freq",),
        **others,
    )


GEMMA_ROW: Options = {"layers": AROUND | ATTENTION | GATED_MLP, "required": GEMMA_REQUIRED}
GEMMA_ROW |= {"activation_key": "hidden_activation"}
OLMO_ROW: Options = {
    "layers": AFTER | ATTENTION | GATED_MLP,
    "needed": {"qk_layernorm": True, "qk_norm_all_heads": True},
}
GLM_ROW: Options = {
    "options": {"add_qkv_bias": "attention_bias"},
    "needed": {"rotary_interleaved": True},
    "required": {},
    "kinds": "G",
}


def deepseek_row(
    model_type: str,
    model_class: str,
    *conversions: Conversion,
    sigmoid: bool = True,
    predicts: bool = False,
    ignored: tuple[str, ...] = (),
) -> HuggingFaceModel:
    """Return the row of a relative of DeepSeek.

    sigmoid: scores of experts are sigmoids, with biases that balance the experts.
    """
    needed: Options = {"multi_latent_attention": True, "rotary_interleaved": True}
    required: dict[str, tuple[Any, ...]] = {"rope_interleave": (True,)}
    if sigmoid:
        needed |= SIGMOID
        required |= {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
    else:
        needed |= {"moe_router_pre_softmax": True}
        required |= {"scoring_func": ("softmax",), "topk_method": ("greedy",), "norm_topk_prob": (False, None)}
        required |= dict.fromkeys(("n_group", "topk_group"), (None, 1))
    return llama_row(
        model_type,
        model_class,
        *(ROTARY, LATENT_HEADS, SHARED_EXPERTS, *conversions),
        layers=BEFORE
        | (LATENT_ATTENTION | GATED_MLP | EXPERTS | SHARED_EXPERTS_LAYERS)
        | (PREDICTIONS if predicts else {}),
        options=ROUTED_BY_SIGMOID
        | {"kv_lora_rank": "kv_lora_rank", "v_head_dim": "v_head_dim"}
        | {"qk_head_dim": "qk_nope_head_dim", "qk_pos_emb_head_dim": "qk_rope_head_dim"},
        needed=needed,
        required=NO_BIASES | required,
        kinds="G",
        ignored=("num_nextn_predict_layers", "ep_size", "moe_layer_freq", "aux_loss_alpha", "seq_aux", *ignored),
        expert_bias=EXPERT_BIAS if sigmoid else "",
        further_layers=True,
        predicts=predicts,
    )
