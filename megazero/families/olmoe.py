"""OLMoE."""

from megazero.families.parts.family import Family, Published
from megazero.families.parts.relatives import LLAMA, ROUTED, SMALL_OLMO, llama_row
from megazero.families.parts.rope_scaling import ROTARY
from megazero.families.parts.tensor_names import ATTENTION, BEFORE, EXPERTS
from megazero.families.parts.weight_conversions import ONE_WIDTH, TOPK_PROB

NORMS = {"qk_layernorm": True, "qk_norm_all_heads": True}
FAMILY = Family(
    "olmoe",
    LLAMA | NORMS | {"norm_epsilon": 1e-5, "num_experts": 64, "moe_router_topk": 8, "moe_router_pre_softmax": True},
    (
        llama_row(
            "olmoe",
            "OlmoeForCausalLM",
            *(ROTARY, TOPK_PROB, ONE_WIDTH),
            layers=BEFORE | ATTENTION | EXPERTS,
            options=ROUTED,
            needed=NORMS,
        ),
    ),
    published={
        "olmoe-1b-7b": Published(
            6_919_161_856,
            (16, 2048, 16, 1024, 16, 50304, 4096),
            {"moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.001},
        )
    },
    small=SMALL_OLMO | {"num_experts": 6, "moe_router_topk": 3, "moe_router_pre_softmax": True},
    place=9,
)
