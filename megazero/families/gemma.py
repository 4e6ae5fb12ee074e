"""Gemma."""

from megazero.families.parts.family import Family, Published
from megazero.families.parts.relatives import GEMMA, GEMMA_REQUIRED, SMALL_GEMMA, llama_row
from megazero.families.parts.rope_scaling import ROTARY
from megazero.families.parts.weight_conversions import HEAD_DIM

FAMILY = Family(
    "gemma",
    GEMMA,
    (llama_row("gemma", "GemmaForCausalLM", ROTARY, HEAD_DIM, required=GEMMA_REQUIRED, kinds="G"),),
    published={"gemma-2b": Published(2_506_172_416, (18, 2048, 8, 16384, 1, 256000, 8192))},
    small=SMALL_GEMMA | {"attention_scale": 0.0},
    place=20,
)
