"""OLMo 2."""

from megazero.families.parts.family import Family, Published
from megazero.families.parts.relatives import OLMO2, OLMO_ROW, SMALL_OLMO, llama_row
from megazero.families.parts.rope_scaling import ROTARY
from megazero.families.parts.weight_conversions import OTHER_HEAD_DIM

FAMILY = Family(
    "olmo2",
    OLMO2,
    (llama_row("olmo2", "Olmo2ForCausalLM", ROTARY, OTHER_HEAD_DIM, **OLMO_ROW),),
    published={"olmo2-7b": Published(7_298_617_344, (32, 4096, 32, 11008, 32, 100352, 4096))},
    small=SMALL_OLMO,
    place=18,
)
