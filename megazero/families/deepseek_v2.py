"""DeepSeek-V2."""

from megazero.families.parts.family import Family, Published
from megazero.families.parts.relatives import DEEPSEEK, SMALL_DEEPSEEK, deepseek_row
from megazero.families.parts.weight_conversions import FIRST_DENSE

FAMILY = Family(
    "deepseek-v2",
    DEEPSEEK | {"moe_router_pre_softmax": True},
    (deepseek_row("deepseek_v2", "DeepseekV2ForCausalLM", FIRST_DENSE, sigmoid=False),),
    published={
        "deepseek-v2-16b": Published(
            15_706_484_224,
            (27, 2048, 16, 10944, 16, 102400, 4096),
            {"num_experts": 64, "moe_router_topk": 6, "moe_layer_freq": "D" + "E" * 26, "moe_ffn_hidden_size": 1408}
            | {"moe_shared_expert_intermediate_size": 2816, "moe_aux_loss_coeff": 0.001},
        )
    },
    small=SMALL_DEEPSEEK
    | {"q_lora_rank": 0, "v_head_dim": 16, "moe_router_pre_softmax": True, "num_experts": 6}
    | {"moe_shared_expert_intermediate_size": 56, "moe_router_topk_scaling_factor": 0.8},
    place=10,
)
