"""Mixtral: Mistral with experts."""

from megazero.families.parts.family import Family, Published
from megazero.families.parts.model_types import EXPERT, SAME, STACKED
from megazero.families.parts.relatives import LLAMA, ROUTED, SMALL_GROUPS, llama_row
from megazero.families.parts.rope_scaling import ROTARY
from megazero.families.parts.tensor_names import ATTENTION, BEFORE, Names
from megazero.families.parts.weight_conversions import HEAD_DIM, ONE_WIDTH, WINDOW

EXPERTS: Names = {
    "mlp.router.weight": (SAME, "block_sparse_moe.gate.weight"),
    "mlp.experts.up.weight": (
        *(EXPERT, "block_sparse_moe.experts.{expert}.w1.weight", "block_sparse_moe.experts.{expert}.w3.weight"),
    ),
    "mlp.experts.down.weight": (STACKED, "block_sparse_moe.experts.{expert}.w2.weight"),
}
FAMILY = Family(
    "mixtral",
    LLAMA | {"norm_epsilon": 1e-5, "rotary_base": 1e6, "num_experts": 8},
    (
        llama_row(
            "mixtral",
            "MixtralForCausalLM",
            *(ROTARY, HEAD_DIM, WINDOW, ONE_WIDTH),
            layers=BEFORE | ATTENTION | EXPERTS,
            options=ROUTED,
        ),
    ),
    published={
        "mixtral-8x7b": Published(46_702_792_704, (32, 4096, 32, 14336, 8, 32000, 4096), {"moe_aux_loss_coeff": 0.01})
    },
    small=SMALL_GROUPS | {"window_size": 5, "num_experts": 5, "moe_router_topk": 3, "untie_embeddings": True},
    place=8,
)
