"""GLM-4.5."""

from megazero.families.parts.family import Family, Published
from megazero.families.parts.relatives import EXPERT_BIAS, LLAMA, ROUTED_BY_SIGMOID, SIGMOID, SMALL_EXPERTS, llama_row
from megazero.families.parts.rope_scaling import PARTIAL_ROTARY
from megazero.families.parts.tensor_names import (
    ATTENTION,
    BEFORE,
    EXPERTS,
    GATED_MLP,
    PREDICTIONS,
    SHARED_EXPERTS_LAYERS,
)
from megazero.families.parts.weight_conversions import (
    EXPERT_GROUPS,
    FIRST_DENSE,
    HEAD_DIM,
    PREDICTIONS_NUMBER,
    SHARED_EXPERTS,
    TOPK_PROB,
)

FAMILY = Family(
    "glm4-moe",
    LLAMA | SIGMOID | {"rotary_base": 1e6, "rotary_percent": 0.5, "norm_epsilon": 1e-5, "add_qkv_bias": True},
    (
        llama_row(
            "glm4_moe",
            "Glm4MoeForCausalLM",
            *(PARTIAL_ROTARY, HEAD_DIM, FIRST_DENSE, EXPERT_GROUPS, TOPK_PROB, SHARED_EXPERTS, PREDICTIONS_NUMBER),
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
    ),
    published={
        "glm4.5-air-107b": Published(
            106_852_245_504,
            (46, 4096, 96, 10944, 8, 151552, 4096),
            {"num_experts": 128, "moe_router_topk": 8, "moe_layer_freq": "D" + "E" * 45, "kv_channels": 128}
            | {"moe_ffn_hidden_size": 1408, "moe_shared_expert_intermediate_size": 1408, "moe_aux_loss_coeff": 0.0001},
        )
    },
    small=SMALL_EXPERTS
    | SIGMOID
    | {"moe_layer_freq": "DEEE", "add_qkv_bias": True, "qk_layernorm": True, "rotary_percent": 0.5, "kv_channels": 12}
    | {"untie_embeddings": True, "moe_router_bias_update_rate": 0.0, "moe_router_topk_scaling_factor": 1.5}
    | {"moe_shared_expert_intermediate_size": 28},
    place=12,
)
