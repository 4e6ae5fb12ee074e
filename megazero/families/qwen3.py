"""Qwen 3: Llama with norms of queries and keys."""

from megazero.families.parts.family import Family, Published
from megazero.families.parts.relatives import LLAMA, SMALL_GROUPS, SMALL_NORMS, SMALL_SCALING, llama_row
from megazero.families.parts.rope_scaling import ROTARY
from megazero.families.parts.weight_conversions import HEAD_DIM, QWEN_WINDOWS

TIED = {"untie_embeddings": False, "kv_channels": 128}
FAMILY = Family(
    "qwen3",
    LLAMA | {"rotary_base": 1e6, "qk_layernorm": True},
    (llama_row("qwen3", "Qwen3ForCausalLM", ROTARY, HEAD_DIM, QWEN_WINDOWS, needed={"qk_layernorm": True}),),
    published={
        "qwen3-0.6b": Published(596_049_920, (28, 1024, 16, 3072, 8, 151936, 4096), TIED),
        "qwen3-1.7b": Published(1_720_574_976, (28, 2048, 16, 6144, 8, 151936, 4096), TIED),
        "qwen3-8b": Published(8_190_735_360, (36, 4096, 32, 12288, 8, 151936, 4096)),
    },
    small=SMALL_GROUPS | SMALL_NORMS | SMALL_SCALING | {"rope_scaling_type": "yarn"},
    place=5,
)
