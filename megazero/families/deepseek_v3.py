"""DeepSeek-V3, Kimi K2 and GLM-4.7-Flash."""

from megazero.families.parts.family import Family, Published
from megazero.families.parts.relatives import DEEPSEEK, SIGMOID, SMALL_DEEPSEEK, SMALL_SCALING, deepseek_row
from megazero.families.parts.weight_conversions import (
    EXPERT_GROUPS,
    FIRST_DENSE,
    MLP_LAYER_TYPES,
    PREDICTIONS_NUMBER,
    TOPK_PROB,
)

SHARED = (EXPERT_GROUPS, TOPK_PROB, PREDICTIONS_NUMBER)
FAMILY = Family(
    "deepseek-v3",
    DEEPSEEK | SIGMOID,
    (
        deepseek_row("deepseek_v3", "DeepseekV3ForCausalLM", FIRST_DENSE, *SHARED, predicts=True),
        deepseek_row(
            "glm4_moe_lite",
            "Glm4MoeLiteForCausalLM",
            *(MLP_LAYER_TYPES, *SHARED),
            ignored=("first_k_dense_replace",),
            predicts=True,
        ),
    ),
    published={
        "deepseek-v3-671b": Published(
            671_026_404_352,
            (61, 7168, 128, 18432, 128, 129280, 4096),
            {"num_experts": 256, "moe_router_topk": 8, "moe_layer_freq": "DDD" + "E" * 58, "q_lora_rank": 1536}
            | {"moe_router_num_groups": 8, "moe_router_group_topk": 4, "moe_router_topk_scaling_factor": 2.5}
            | {"moe_ffn_hidden_size": 2048, "moe_shared_expert_intermediate_size": 2048, "moe_aux_loss_coeff": 0.0001}
            | {"init_method_std": 0.006},
        ),
        "kimi-k2-1t": Published(
            1_026_408_209_408,
            (61, 7168, 64, 18432, 64, 163840, 4096),
            {"num_experts": 384, "moe_router_topk": 8, "moe_layer_freq": "D" + "E" * 60, "q_lora_rank": 1536}
            | {"moe_router_topk_scaling_factor": 2.827, "rotary_base": 5e4, "moe_aux_loss_coeff": 0.001}
            | {"moe_ffn_hidden_size": 2048, "moe_shared_expert_intermediate_size": 2048},
        ),
    },
    small=SMALL_DEEPSEEK
    | SMALL_SCALING
    | SIGMOID
    | {"rope_scaling_type": "yarn", "mscale": 0.7, "mscale_all_dim": 1.2, "num_experts": 8}
    | {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_shared_expert_intermediate_size": 28}
    | {"moe_router_topk_scaling_factor": 1.5, "moe_router_bias_update_rate": 0.0},
    place=11,
)
