"""gpt-oss."""

from megazero.engine.options.model_options import SWIGLU_LIMIT, SWIGLU_SLOPE
from megazero.families.parts.family import Family, Published
from megazero.families.parts.model_types import EXPERTS_PAIRS, TRANSPOSED_EXPERTS
from megazero.families.parts.relatives import ROTATED, SMALL_GROUPS, SMALL_SCALING, llama_row
from megazero.families.parts.rope_scaling import ROTARY
from megazero.families.parts.tensor_names import ATTENTION, BEFORE, Names, same_forms
from megazero.families.parts.weight_conversions import HEAD_DIM, WINDOWS

EXPERTS: Names = {
    **same_forms(
        attention__sinks__weight="self_attn.sinks",
        attention__proj__bias="self_attn.o_proj.bias",
        mlp__router__weight="mlp.router.weight",
        mlp__router__logit_bias="mlp.router.bias",
        mlp__experts__down__bias="mlp.experts.down_proj_bias",
    ),
    "mlp.experts.up.weight": (EXPERTS_PAIRS, "mlp.experts.gate_up_proj"),
    "mlp.experts.up.bias": (EXPERTS_PAIRS, "mlp.experts.gate_up_proj_bias"),
    "mlp.experts.down.weight": (TRANSPOSED_EXPERTS, "mlp.experts.down_proj"),
}
YARN = {"rope_scaling_type": "yarn", "yarn_correction_range_round_to_int": False}
FAMILY = Family(
    "gpt-oss",
    ROTATED
    | {"norm": "rmsnorm", "activation": "swiglu-clamped", "linear_biases": ("qkv", "proj", "experts")}
    | {"attention_sinks": True, "untie_embeddings": True, "kv_channels": 64, "window_size": 128, "layer_pattern": "LG"}
    | {"rotary_base": 1.5e5, "rope_scaling_factor": 32.0, "rope_trained_length": 4096, **YARN}
    | {"num_experts": 32, "moe_router_topk": 4},
    (
        llama_row(
            "gpt_oss",
            "GptOssForCausalLM",
            *(ROTARY, HEAD_DIM, WINDOWS),
            layers=BEFORE | ATTENTION | EXPERTS,
            options={"num_experts": "num_local_experts", "moe_router_topk": "num_experts_per_tok"},
            activations={},
            required={"hidden_act": ("silu",), "attention_bias": (True,)}
            | {"swiglu_limit": (SWIGLU_LIMIT,), "swiglu_alpha": (SWIGLU_SLOPE,)},
            ignored=("experts_per_token", "initial_context_length"),
        ),
    ),
    published={
        "gpt-oss-20b": Published(20_914_757_184, (24, 2880, 64, 2880, 8, 201088, 4096), {"moe_aux_loss_coeff": 0.001}),
        "gpt-oss-120b": Published(
            116_829_156_672, (36, 2880, 64, 2880, 8, 201088, 4096), {"moe_aux_loss_coeff": 0.001, "num_experts": 128}
        ),
    },
    small=SMALL_GROUPS
    | SMALL_SCALING
    | YARN
    | {"kv_channels": 16, "window_size": 4, "layer_pattern": "LG", "rotary_base": 5e3}
    | {"num_experts": 6, "moe_router_topk": 3, "untie_embeddings": True},
    place=13,
)
