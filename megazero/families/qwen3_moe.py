"""Qwen 3 with experts."""

from megazero.families.parts.family import Family, Published
from megazero.families.parts.relatives import LLAMA, ROUTED_AND_DENSE, SMALL_EXPERTS, SMALL_NORMS, llama_row
from megazero.families.parts.rope_scaling import ROTARY
from megazero.families.parts.tensor_names import ATTENTION, BEFORE, EXPERTS, GATED_MLP
from megazero.families.parts.weight_conversions import HEAD_DIM, SPARSE_LAYERS, SWITCHED_WINDOW, TOPK_PROB

FAMILY = Family(
    "qwen3-moe",
    LLAMA | {"rotary_base": 1e6, "qk_layernorm": True, "num_experts": 128, "moe_router_topk": 8},
    (
        llama_row(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            *(ROTARY, HEAD_DIM, SWITCHED_WINDOW, SPARSE_LAYERS, TOPK_PROB),
            layers=BEFORE | ATTENTION | GATED_MLP | EXPERTS,
            options=ROUTED_AND_DENSE,
            needed={"qk_layernorm": True},
        ),
    ),
    published={
        "qwen3-30b-a3b": Published(
            30_532_122_624,
            (48, 2048, 32, 8192, 4, 151936, 4096),
            {"kv_channels": 128, "moe_ffn_hidden_size": 768, "moe_aux_loss_coeff": 0.001},
        )
    },
    small=SMALL_EXPERTS | SMALL_NORMS | {"window_size": 6, "rotary_base": 5e3},
    place=7,
)
