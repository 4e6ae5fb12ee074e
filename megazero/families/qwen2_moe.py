"""Qwen 1.5 and 2 with experts."""

from megazero.families.parts.family import Family, Published
from megazero.families.parts.relatives import LLAMA, ROUTED_AND_DENSE, SMALL_EXPERTS, llama_row
from megazero.families.parts.rope_scaling import ROTARY
from megazero.families.parts.tensor_names import ATTENTION, BEFORE, EXPERTS, GATED_MLP, SHARED_EXPERT
from megazero.families.parts.weight_conversions import OTHER_HEAD_DIM, QWEN_WINDOWS, SPARSE_LAYERS, TOPK_PROB

SHARED = {"moe_router_pre_softmax": True, "moe_shared_expert_gate": True}
FAMILY = Family(
    "qwen2-moe",
    LLAMA | {"rotary_base": 1e6, "add_qkv_bias": True, "num_experts": 60, "moe_router_topk": 4} | SHARED,
    (
        llama_row(
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            *(ROTARY, OTHER_HEAD_DIM, QWEN_WINDOWS, SPARSE_LAYERS, TOPK_PROB),
            layers=BEFORE | ATTENTION | GATED_MLP | EXPERTS | SHARED_EXPERT,
            options=ROUTED_AND_DENSE
            | {"add_qkv_bias": "qkv_bias", "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size"},
            needed={"moe_shared_expert_gate": True},
        ),
    ),
    published={
        "qwen1.5-moe-a2.7b": Published(
            14_315_784_192,
            (24, 2048, 16, 8192, 16, 151936, 4096),
            {"moe_ffn_hidden_size": 1408, "moe_shared_expert_intermediate_size": 5632, "moe_aux_loss_coeff": 0.001},
        )
    },
    small=SMALL_EXPERTS
    | SHARED
    | {"add_qkv_bias": True, "moe_shared_expert_intermediate_size": 20, "window_size": 6, "layer_pattern": "GL"},
    place=6,
)
