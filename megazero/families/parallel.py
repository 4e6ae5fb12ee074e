"""The layers of GPT-J without its bias of the logits and its defaults. transformers has no such model."""

from megazero.families.parts.family import Family, Published
from megazero.families.parts.relatives import SIDE_BY_SIDE

FAMILY = Family(
    "parallel",
    SIDE_BY_SIDE,
    published={"parallel-6b": Published(0, (28, 4096, 16, 16384, 16, 50400, 2048), {"untie_embeddings": True})},
    place=27,
)
