"""The families of models that Hugging Face's transformers has: one row of MODELS each.

Shapes: h hidden, n heads, g groups of heads that share keys and values, d head dim, f ffn, E experts.
"""

from collections.abc import Mapping
from typing import Any

from megazero.engine.kernels.eager import SWIGLU_LIMIT, SWIGLU_SLOPE
from megazero.flags.config import ModelConfig
from megazero.flags.flag_names import as_flag
from megazero.interop.huggingface.gpt_families import GPT2, GPTJ
from megazero.interop.huggingface.model_types import (
    ACTIVATIONS,
    GATED_ACTIVATIONS,
    OUTPUT,
    QKV_BY_HEAD,
    SAME,
    Conversion,
    HuggingFaceModel,
    Options,
)
from megazero.interop.huggingface.rope_scaling import LOCAL_ROTARY, PARTIAL_ROTARY, ROTARY
from megazero.interop.huggingface.tensor_names import (
    AFTER,
    AROUND,
    AROUND_GLM4,
    ATTENTION,
    BEFORE,
    EXPERTS,
    EXPERTS_IN_MEMORY,
    GATED_MLP,
    GLM,
    GPT_OSS,
    LATENT_ATTENTION,
    LLAMA_OUTSIDE,
    MIXTRAL_EXPERTS,
    PHI3_LAYERS,
    PREDICTIONS,
    SHARED_EXPERT,
    SHARED_EXPERTS_LAYERS,
    Names,
    same_forms,
    tensor_rows,
    weight_and_bias,
)
from megazero.interop.huggingface.weight_conversions import (
    ATTENTION_MULTIPLIER,
    EXPERT_GROUPS,
    FIRST_DENSE,
    GEMMA2_SOFTCAP,
    GEMMA_SCORES,
    HEAD_DIM,
    LATENT_HEADS,
    MLP_LAYER_TYPES,
    NO_ROPE_LAYERS,
    ONE_WIDTH,
    OTHER_HEAD_DIM,
    PHI3,
    PREDICTIONS_NUMBER,
    QWEN_WINDOWS,
    SHARED_EXPERTS,
    SPARSE_LAYERS,
    STARCODER2_DROPOUT,
    SWITCHED_WINDOW,
    TOPK_PROB,
    USUAL_HEAD_DIM,
    WINDOW,
    WINDOWS,
)

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


def _llama(
    model_type: str,
    model_class: str,
    *conversions: Conversion,
    architecture: str = "",
    layers: Names = BEFORE | ATTENTION | GATED_MLP,
    options: dict[str, str] | None = None,
    needed: Options | None = None,
    required: dict[str, tuple[Any, ...]] = NO_BIASES,
    kinds: str = "GL",
    activations: Mapping[str, tuple[str, ...]] = GATED_ACTIVATIONS,
    **others: Any,
) -> HuggingFaceModel:
    """Return a relative of Llama.

    Args:
        layers: names of the tensors in blocks.
        options: besides Llama's; see `HuggingFaceModel`.
        others: further fields of it.
    """
    return HuggingFaceModel(
        model_type=model_type,
        model_class=model_class,
        architecture=architecture or model_type,
        prefix="model.",
        tensors=tensor_rows(LLAMA_OUTSIDE, "model.layers.{}.", layers, EXPERTS_IN_MEMORY),
        options=LLAMA_OPTIONS | (options or {}),
        conversions=conversions,
        required=required,
        needed=needed or {},
        kinds=kinds,
        activations=activations,
        buffers=(".rotary_emb.inv_freq",),
        **others,
    )


GEMMA: Options = {"layers": AROUND | ATTENTION | GATED_MLP, "required": GEMMA_REQUIRED}
GEMMA |= {"activation_key": "hidden_activation"}
OLMO: Options = {
    "layers": AFTER | ATTENTION | GATED_MLP,
    "needed": {"qk_layernorm": True, "qk_norm_all_heads": True},
}
GLMS: Options = {
    "options": {"add_qkv_bias": "attention_bias"},
    "needed": {"rotary_interleaved": True},
    "required": {},
    "kinds": "G",
}

ROUTED = {"num_experts": "num_experts", "moe_router_topk": "num_experts_per_tok"}
ROUTED_AND_DENSE = ROUTED | {"moe_ffn_hidden_size": "moe_intermediate_size"}
ROUTED_BY_SIGMOID = ROUTED_AND_DENSE | {
    "num_experts": "n_routed_experts",
    "moe_router_topk_scaling_factor": "routed_scaling_factor",
}
SIGMOID: Options = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
EXPERT_BIAS = "model.layers.{}.mlp.gate.e_score_correction_bias"
LATENTS = ROUTED_BY_SIGMOID | {
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}


def _deepseek(
    model_type: str,
    model_class: str,
    *conversions: Conversion,
    sigmoid: bool = True,
    predicts: bool = False,
    ignored: tuple[str, ...] = (),
    **others: Any,
) -> HuggingFaceModel:
    """Return a relative of DeepSeek. sigmoid: scores of experts are sigmoids, with biases that balance the experts."""
    needed: Options = {"multi_latent_attention": True, "rotary_interleaved": True}
    required: dict[str, tuple[Any, ...]] = {"rope_interleave": (True,)}
    if sigmoid:
        needed |= SIGMOID
        required |= {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
    else:
        needed |= {"moe_router_pre_softmax": True}
        required |= {"scoring_func": ("softmax",), "topk_method": ("greedy",), "norm_topk_prob": (False, None)}
        required |= dict.fromkeys(("n_group", "topk_group"), (None, 1))
    return _llama(
        model_type,
        model_class,
        *(ROTARY, LATENT_HEADS, SHARED_EXPERTS, *conversions),
        layers=BEFORE
        | (LATENT_ATTENTION | GATED_MLP | EXPERTS | SHARED_EXPERTS_LAYERS)
        | (PREDICTIONS if predicts else {}),
        options=LATENTS,
        needed=needed,
        required=NO_BIASES | required,
        kinds="G",
        ignored=("num_nextn_predict_layers", "ep_size", "moe_layer_freq", "aux_loss_alpha", "seq_aux", *ignored),
        expert_bias=EXPERT_BIAS if sigmoid else "",
        further_layers=True,
        predicts=predicts,
        **others,
    )


NEOX = HuggingFaceModel(
    model_type="gpt_neox",
    model_class="GPTNeoXForCausalLM",
    architecture="gpt-neox",
    prefix="gpt_neox.",
    tensors=tensor_rows(
        {
            "token_embedding.weight": "gpt_neox.embed_in.weight",
            "head.norm.weight": "gpt_neox.final_layer_norm.weight",
            "head.norm.bias": "gpt_neox.final_layer_norm.bias",
            "head.output.weight": "embed_out.weight",
        },
        "gpt_neox.layers.{}.",
        weight_and_bias("norm", SAME, "input_layernorm"),
        {
            (f"attention.query.{kind}", f"attention.kv.{kind}"): (QKV_BY_HEAD, f"attention.query_key_value.{kind}")
            for kind in ("weight", "bias")
        },
        weight_and_bias("attention.proj", SAME, "attention.dense"),
        weight_and_bias("mlp_norm", SAME, "post_attention_layernorm"),
        weight_and_bias("mlp.up", SAME, "mlp.dense_h_to_4h"),
        weight_and_bias("mlp.down", SAME, "mlp.dense_4h_to_h"),
    )
    + tensor_rows({"head.output.weight": OUTPUT}, ""),  # as their class names it in memory, and our earlier exports
    options={name: theirs for name, theirs in LLAMA_OPTIONS.items() if name != "num_query_groups"}
    | {"norm_epsilon": "layer_norm_eps", "hidden_dropout": "hidden_dropout"},
    conversions=(PARTIAL_ROTARY,),
    activations=ACTIVATIONS,
    required={"attention_bias": (True,), "use_parallel_residual": (True,)},
    needed={},
    buffers=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
)
MODELS = {
    model.model_type: model
    for model in (
        GPT2,
        GPTJ,
        NEOX,
        _llama("llama", "LlamaForCausalLM", ROTARY, HEAD_DIM),
        _llama("mistral", "MistralForCausalLM", ROTARY, HEAD_DIM, WINDOW),
        _llama("ministral", "MinistralForCausalLM", ROTARY, HEAD_DIM, WINDOWS, architecture="mistral"),
        _llama("qwen2", "Qwen2ForCausalLM", ROTARY, OTHER_HEAD_DIM, QWEN_WINDOWS, needed={"add_qkv_bias": True}),
        _llama("qwen3", "Qwen3ForCausalLM", ROTARY, HEAD_DIM, QWEN_WINDOWS, needed={"qk_layernorm": True}),
        _llama(
            "mixtral",
            "MixtralForCausalLM",
            *(ROTARY, HEAD_DIM, WINDOW, ONE_WIDTH),
            layers=BEFORE | ATTENTION | MIXTRAL_EXPERTS,
            options=ROUTED,
        ),
        _llama(
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            *(ROTARY, OTHER_HEAD_DIM, QWEN_WINDOWS, SPARSE_LAYERS, TOPK_PROB),
            architecture="qwen2-moe",
            layers=BEFORE | ATTENTION | GATED_MLP | EXPERTS | SHARED_EXPERT,
            options=ROUTED_AND_DENSE
            | {"add_qkv_bias": "qkv_bias", "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size"},
            needed={"moe_shared_expert_gate": True},
        ),
        _llama(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            *(ROTARY, HEAD_DIM, SWITCHED_WINDOW, SPARSE_LAYERS, TOPK_PROB),
            architecture="qwen3-moe",
            layers=BEFORE | ATTENTION | GATED_MLP | EXPERTS,
            options=ROUTED_AND_DENSE,
            needed={"qk_layernorm": True},
        ),
        _llama(
            "olmoe",
            "OlmoeForCausalLM",
            *(ROTARY, TOPK_PROB, ONE_WIDTH),
            layers=BEFORE | ATTENTION | EXPERTS,
            options=ROUTED,
            needed={"qk_layernorm": True, "qk_norm_all_heads": True},
        ),
        _deepseek(
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            *(FIRST_DENSE, EXPERT_GROUPS, TOPK_PROB, PREDICTIONS_NUMBER),
            architecture="deepseek-v3",
            predicts=True,
        ),
        _deepseek(
            "deepseek_v2",
            "DeepseekV2ForCausalLM",
            FIRST_DENSE,
            sigmoid=False,
            architecture="deepseek-v2",
        ),
        _deepseek(
            "glm4_moe_lite",
            "Glm4MoeLiteForCausalLM",
            *(MLP_LAYER_TYPES, EXPERT_GROUPS, TOPK_PROB, PREDICTIONS_NUMBER),
            ignored=("first_k_dense_replace",),
            architecture="deepseek-v3",
            predicts=True,
        ),
        _llama(
            "glm4_moe",
            "Glm4MoeForCausalLM",
            *(PARTIAL_ROTARY, HEAD_DIM, FIRST_DENSE, EXPERT_GROUPS, TOPK_PROB, SHARED_EXPERTS, PREDICTIONS_NUMBER),
            architecture="glm4-moe",
            layers=BEFORE | ATTENTION | GATED_MLP | EXPERTS | SHARED_EXPERTS_LAYERS | PREDICTIONS,
            options=ROUTED_BY_SIGMOID | {"add_qkv_bias": "attention_bias", "qk_layernorm": "use_qk_norm"},
            needed=SIGMOID,
            required={},
            kinds="G",
            ignored=("num_nextn_predict_layers",),
            expert_bias=EXPERT_BIAS,
            further_layers=True,
            predicts=True,
        ),
        _llama(
            "helium",
            "HeliumForCausalLM",
            *(ROTARY, USUAL_HEAD_DIM),
            architecture="llama",
            needed={"rotary_interleaved": True},
            kinds="G",
        ),
        _llama(
            "glm",
            "GlmForCausalLM",
            *(PARTIAL_ROTARY, HEAD_DIM),
            architecture="llama",
            layers=BEFORE | GLM,
            **GLMS,
        ),
        _llama("glm4", "Glm4ForCausalLM", PARTIAL_ROTARY, HEAD_DIM, layers=AROUND_GLM4 | GLM, **GLMS),
        _llama(
            "gpt_oss",
            "GptOssForCausalLM",
            *(ROTARY, HEAD_DIM, WINDOWS),
            architecture="gpt-oss",
            layers=BEFORE | ATTENTION | GPT_OSS,
            options={"num_experts": "num_local_experts", "moe_router_topk": "num_experts_per_tok"},
            activations={},
            required={"hidden_act": ("silu",), "attention_bias": (True,)}
            | {"swiglu_limit": (SWIGLU_LIMIT,), "swiglu_alpha": (SWIGLU_SLOPE,)},
            ignored=("experts_per_token", "initial_context_length"),
        ),
        _llama("olmo2", "Olmo2ForCausalLM", ROTARY, OTHER_HEAD_DIM, **OLMO),
        _llama("olmo3", "Olmo3ForCausalLM", LOCAL_ROTARY, OTHER_HEAD_DIM, WINDOWS, **OLMO),
        _llama(
            "gemma",
            "GemmaForCausalLM",
            *(ROTARY, HEAD_DIM),
            required=GEMMA_REQUIRED,
            kinds="G",
        ),
        _llama("gemma2", "Gemma2ForCausalLM", ROTARY, HEAD_DIM, WINDOWS, GEMMA_SCORES, GEMMA2_SOFTCAP, **GEMMA),
        _llama(
            "gemma3_text",
            "Gemma3ForCausalLM",
            *(LOCAL_ROTARY, HEAD_DIM, WINDOWS, GEMMA_SCORES),
            **GEMMA,
            architecture="gemma3",
            needed={"qk_layernorm": True},
            ignored=("attn_logit_softcapping",),
        ),
        _llama(
            "phi3",
            "Phi3ForCausalLM",
            *(PARTIAL_ROTARY, OTHER_HEAD_DIM, WINDOW, PHI3),
            layers=BEFORE | PHI3_LAYERS,
            options={"hidden_dropout": "resid_pdrop"},
        ),
        _llama(
            "smollm3",
            "SmolLM3ForCausalLM",
            *(ROTARY, OTHER_HEAD_DIM, NO_ROPE_LAYERS),
            required=NO_BIASES | {"use_sliding_window": (False,)},
            kinds="GN",
        ),
        _llama(
            "stablelm",
            "StableLmForCausalLM",
            PARTIAL_ROTARY,
            layers=weight_and_bias("norm1", SAME, "input_layernorm")
            | weight_and_bias("norm2", SAME, "post_attention_layernorm")
            | ATTENTION
            | GATED_MLP,
            options={
                "norm_epsilon": "layer_norm_eps",
                "add_qkv_bias": "use_qkv_bias",
                "hidden_dropout": "hidden_dropout",
            },
            required=NO_BIASES | {"use_parallel_residual": (False,), "qk_layernorm": (False,)},
        ),
        _llama(
            "starcoder2",
            "Starcoder2ForCausalLM",
            *(ROTARY, OTHER_HEAD_DIM, WINDOW, STARCODER2_DROPOUT),
            layers=weight_and_bias("norm1", SAME, "input_layernorm")
            | weight_and_bias("norm2", SAME, "post_attention_layernorm")
            | ATTENTION
            | same_forms(attention__proj__bias="self_attn.o_proj.bias")
            | weight_and_bias("mlp.up", SAME, "mlp.c_fc")
            | weight_and_bias("mlp.down", SAME, "mlp.c_proj"),
            options={"norm_epsilon": "norm_epsilon", "hidden_dropout": "residual_dropout"},
            activations=ACTIVATIONS,
            required={"use_bias": (True,)}
            | {"mlp_type": ("default",), "norm_type": ("layer_norm",)},  # of published files; their class has neither
        ),
        _llama(
            "granite",
            "GraniteForCausalLM",
            *(ROTARY, OTHER_HEAD_DIM, ATTENTION_MULTIPLIER),
            options={
                "embedding_multiplier": "embedding_multiplier",
                "residual_multiplier": "residual_multiplier",
                "logits_divisor": "logits_scaling",
            },
        ),
    )
}


def family_of(model: ModelConfig, source_type: str = "") -> HuggingFaceModel:
    """Return the family that computes the same as `model`: that of its source, of its name, or another.

    Args:
        source_type: model_type of the config.json from which the model came.

    Raises:
        ValueError: no family computes it.
    """
    own = [each for each in MODELS.values() if each.architecture == model.architecture]
    first = [MODELS[source_type]] if source_type in MODELS else []
    refused = None
    for found in [*first, *own, *MODELS.values()]:
        if not found.differences(model):
            try:
                found.converted(model)
            except ValueError as error:  # DeepSeek-V3 has dense layers at the start alone, GLM-4.7-Flash anywhere
                refused = refused or error
            else:
                return found
    if refused:
        raise refused
    if not own:
        raise ValueError(
            f"--architecture {model.architecture} has no table that converts it to Hugging Face; see docs/extending.md"
        )
    flags = [as_flag(name.replace("_", "-"), getattr(model, name)) for name in own[0].differences(model)]
    raise ValueError(f"no model of Hugging Face is a {own[0].model_type} with {', '.join(flags)}")
