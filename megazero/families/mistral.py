"""Mistral and Ministral: Llama with windows."""

from megazero.families.parts.family import Family, Published
from megazero.families.parts.relatives import LLAMA, SMALL_GROUPS, llama_row
from megazero.families.parts.rope_scaling import ROTARY
from megazero.families.parts.weight_conversions import HEAD_DIM, WINDOW, WINDOWS

WINDOWED = {"window_size": 4096}
FAMILY = Family(
    "mistral",
    LLAMA | {"norm_epsilon": 1e-5, "rotary_base": 1e6},
    (
        llama_row("mistral", "MistralForCausalLM", ROTARY, HEAD_DIM, WINDOW, class_options=WINDOWED),
        llama_row("ministral", "MinistralForCausalLM", ROTARY, HEAD_DIM, WINDOWS, class_options=WINDOWED),
    ),
    published={
        "mistral-7b": Published(7_241_732_096, (32, 4096, 32, 14336, 8, 32000, 8192), WINDOWED | {"rotary_base": 1e4}),
        "mistral-v0.3-7b": Published(7_248_023_552, (32, 4096, 32, 14336, 8, 32768, 8192)),
    },
    small=SMALL_GROUPS | {"window_size": 5, "kv_channels": 14},
    place=3,
)
