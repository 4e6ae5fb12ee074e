"""OLMo 3: OLMo 2 with windows."""

from megazero.families.parts.family import Family, Published
from megazero.families.parts.relatives import OLMO2, OLMO_ROW, SMALL_OLMO, SMALL_SCALING, SMALL_WINDOWS, llama_row
from megazero.families.parts.rope_scaling import LOCAL_ROTARY
from megazero.families.parts.weight_conversions import OTHER_HEAD_DIM, WINDOWS

FAMILY = Family(
    "olmo3",
    OLMO2 | {"window_size": 4096, "layer_pattern": "LLLG", "local_rotary_base": 5e5},
    (llama_row("olmo3", "Olmo3ForCausalLM", LOCAL_ROTARY, OTHER_HEAD_DIM, WINDOWS, **OLMO_ROW),),
    published={
        "olmo3-7b": Published(
            7_298_011_136,
            (32, 4096, 32, 11008, 32, 100278, 8192),
            {"rope_scaling_factor": 8, "rope_scaling_type": "yarn"},
        )
    },
    small=SMALL_OLMO
    | SMALL_WINDOWS
    | SMALL_SCALING
    | {"rope_scaling_type": "yarn", "rotary_base": 5e3, "local_rotary_base": 3e3},
    place=19,
)
