"""Qwen 2: Llama with biases of queries, keys and values."""

from megazero.families.parts.family import Family, Published
from megazero.families.parts.relatives import LLAMA, SMALL_GROUPS, llama_row
from megazero.families.parts.rope_scaling import ROTARY
from megazero.families.parts.weight_conversions import OTHER_HEAD_DIM, QWEN_WINDOWS

TIED = {"untie_embeddings": False}
FAMILY = Family(
    "qwen2",
    LLAMA | {"rotary_base": 1e6, "add_qkv_bias": True},
    (llama_row("qwen2", "Qwen2ForCausalLM", ROTARY, OTHER_HEAD_DIM, QWEN_WINDOWS, needed={"add_qkv_bias": True}),),
    published={
        "qwen2-0.5b": Published(494_032_768, (24, 896, 14, 4864, 2, 151936, 4096), TIED),
        "qwen2-1.5b": Published(1_543_714_304, (28, 1536, 12, 8960, 2, 151936, 4096), TIED),
    },
    small=SMALL_GROUPS | {"add_qkv_bias": True, "window_size": 6, "layer_pattern": "GL"},
    place=4,
)
