"""GLM-4-0414."""

from megazero.families.parts.family import Family, Published
from megazero.families.parts.relatives import GLM_ROW, LLAMA, SMALL_GROUPS, llama_row
from megazero.families.parts.rope_scaling import PARTIAL_ROTARY
from megazero.families.parts.tensor_names import GLM, same_forms
from megazero.families.parts.weight_conversions import HEAD_DIM

AROUND = same_forms(
    norm1__weight="input_layernorm.weight",
    norm1_after__weight="post_self_attn_layernorm.weight",
    norm2__weight="post_attention_layernorm.weight",
    norm2_after__weight="post_mlp_layernorm.weight",
)
FAMILY = Family(
    "glm4",
    LLAMA | {"norm_place": "around", "norm_epsilon": 1e-5, "rotary_percent": 0.5, "rotary_interleaved": True},
    (llama_row("glm4", "Glm4ForCausalLM", PARTIAL_ROTARY, HEAD_DIM, layers=AROUND | GLM, **GLM_ROW),),
    published={"glm4-9b": Published(9_400_279_040, (40, 4096, 32, 13696, 2, 151552, 8192), {"add_qkv_bias": True})},
    small=SMALL_GROUPS | {"rotary_percent": 0.5, "rotary_interleaved": True, "add_qkv_bias": True, "kv_channels": 12},
    place=14,
)
