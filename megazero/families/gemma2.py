"""Gemma 2."""

from megazero.families.parts.family import Family, Published
from megazero.families.parts.model_types import Conversion
from megazero.families.parts.relatives import GEMMA, GEMMA_ROW, SMALL_GEMMA, SMALL_WINDOWS, llama_row
from megazero.families.parts.rope_scaling import ROTARY
from megazero.families.parts.weight_conversions import GEMMA_SCORES, HEAD_DIM, WINDOWS

SOFTCAP = Conversion(
    ("attention_softcap",),
    lambda model: {"attn_logit_softcapping": model.attention_softcap or None},
    lambda config: {"attention_softcap": config.attn_logit_softcapping or 0.0},
)
FAMILY = Family(
    "gemma2",
    GEMMA
    | {"norm_place": "around", "window_size": 4096, "layer_pattern": "LG"}
    | {"attention_softcap": 50.0, "final_softcap": 30.0},
    (llama_row("gemma2", "Gemma2ForCausalLM", ROTARY, HEAD_DIM, WINDOWS, GEMMA_SCORES, SOFTCAP, **GEMMA_ROW),),
    published={"gemma2-2b": Published(2_614_341_888, (26, 2304, 8, 9216, 4, 256000, 8192))},
    small=SMALL_GEMMA | SMALL_WINDOWS | {"attention_softcap": 1.5, "final_softcap": 2.5},
    place=21,
)
