"""Gemma 3, its models of text."""

from megazero.families.parts.family import Family, Published
from megazero.families.parts.relatives import GEMMA, GEMMA_ROW, SMALL_GEMMA, SMALL_WINDOWS, llama_row
from megazero.families.parts.rope_scaling import LOCAL_ROTARY
from megazero.families.parts.weight_conversions import GEMMA_SCORES, HEAD_DIM, WINDOWS

FAMILY = Family(
    "gemma3",
    GEMMA
    | {"norm_place": "around", "window_size": 1024, "layer_pattern": "LLLLLG"}
    | {"rotary_base": 1e6, "local_rotary_base": 1e4, "qk_layernorm": True},
    (
        llama_row(
            "gemma3_text",
            "Gemma3ForCausalLM",
            *(LOCAL_ROTARY, HEAD_DIM, WINDOWS, GEMMA_SCORES),
            **GEMMA_ROW,
            needed={"qk_layernorm": True},
            ignored=("attn_logit_softcapping",),
        ),
    ),
    published={"gemma3-1b": Published(999_885_952, (26, 1152, 4, 6912, 1, 262144, 8192), {"window_size": 512})},
    small=SMALL_GEMMA
    | SMALL_WINDOWS
    | {"qk_layernorm": True, "local_rotary_base": 3e3, "rope_scaling_type": "linear", "rope_scaling_factor": 8.0},
    place=22,
)
