"""Granite: Llama with factors of embeddings, scores, branches and logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megazero.families.parts.family import Family, Published
from megazero.families.parts.model_types import Conversion, Options
from megazero.families.parts.relatives import LLAMA, SMALL_GROUPS, llama_row
from megazero.families.parts.rope_scaling import ROTARY
from megazero.families.parts.weight_conversions import OTHER_HEAD_DIM, usual_head_dim

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def _from_attention_multiplier(config: PreTrainedConfig) -> Options:
    head_dim = getattr(config, "head_dim", None) or usual_head_dim(config)
    usual = config.attention_multiplier == head_dim**-0.5
    return {"attention_scale": 0.0 if usual else float(config.attention_multiplier)}


ATTENTION_MULTIPLIER = Conversion(
    ("attention_scale",),
    lambda model: {"attention_multiplier": model.attention_scale or model.head_dim**-0.5},
    _from_attention_multiplier,
)
FAMILY = Family(
    "granite",
    LLAMA | {"norm_epsilon": 1e-5, "untie_embeddings": False},
    (
        llama_row(
            "granite",
            "GraniteForCausalLM",
            *(ROTARY, OTHER_HEAD_DIM, ATTENTION_MULTIPLIER),
            options={
                "embedding_multiplier": "embedding_multiplier",
                "residual_multiplier": "residual_multiplier",
                "logits_divisor": "logits_scaling",
            },
        ),
    ),
    published={
        "granite-2b": Published(
            2_533_525_504,
            (40, 2048, 32, 8192, 8, 49152, 4096),
            {"embedding_multiplier": 12, "residual_multiplier": 0.22, "logits_divisor": 8, "attention_scale": 1 / 64},
        )
    },
    small=SMALL_GROUPS
    | {"attention_scale": 0.2, "residual_multiplier": 0.3, "embedding_multiplier": 3.0, "logits_divisor": 1.5},
    place=17,
)
