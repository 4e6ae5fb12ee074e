"""StableLM: Llama with LayerNorm."""

from megazero.families.parts.family import Family, Published
from megazero.families.parts.relatives import NO_BIASES, ROTATED, SMALL_GROUPS, llama_row
from megazero.families.parts.rope_scaling import PARTIAL_ROTARY
from megazero.families.parts.tensor_names import ATTENTION, GATED_MLP, LAYER_NORMS

FAMILY = Family(
    "stablelm",
    ROTATED | {"activation": "swiglu", "linear_biases": (), "untie_embeddings": True, "rotary_percent": 0.25},
    (
        llama_row(
            "stablelm",
            "StableLmForCausalLM",
            PARTIAL_ROTARY,
            layers=LAYER_NORMS | ATTENTION | GATED_MLP,
            options={
                "norm_epsilon": "layer_norm_eps",
                "add_qkv_bias": "use_qkv_bias",
                "hidden_dropout": "hidden_dropout",
            },
            required=NO_BIASES | {"use_parallel_residual": (False,), "qk_layernorm": (False,)},
        ),
    ),
    published={
        "stablelm-1.6b": Published(1_644_515_328, (24, 2048, 32, 5632, 32, 100352, 4096), {"add_qkv_bias": True})
    },
    small=SMALL_GROUPS | {"rotary_percent": 0.34, "add_qkv_bias": True},
    place=25,
)
