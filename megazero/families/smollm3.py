"""SmolLM3: Llama with layers that have no positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megazero.engine.options.model_options import ModelOptions
from megazero.families.parts.family import Family, Published
from megazero.families.parts.model_types import Conversion, Options, attention_kinds
from megazero.families.parts.relatives import LLAMA, NO_BIASES, SMALL_GROUPS, llama_row
from megazero.families.parts.rope_scaling import ROTARY
from megazero.families.parts.weight_conversions import GLOBAL, OTHER_HEAD_DIM, layer_types_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def _to_theirs(model: ModelOptions) -> Options:
    kinds = attention_kinds(model)
    return {"no_rope_layers": [int(kind != "N") for kind in kinds], "layer_types": [GLOBAL] * len(kinds)}


def _to_ours(config: PreTrainedConfig) -> Options:
    return {"layer_pattern": layer_types_of("".join("G" if rotates else "N" for rotates in config.no_rope_layers))}


FAMILY = Family(
    "smollm3",
    LLAMA | {"rotary_base": 5e6, "layer_pattern": "GGGN", "untie_embeddings": False},
    (
        llama_row(
            "smollm3",
            "SmolLM3ForCausalLM",
            *(ROTARY, OTHER_HEAD_DIM, Conversion(("layer_pattern",), _to_theirs, _to_ours)),
            required=NO_BIASES | {"use_sliding_window": (False,)},
            kinds="GN",
        ),
    ),
    published={"smollm3-3b": Published(3_075_098_624, (36, 2048, 16, 11008, 4, 128256, 4096))},
    small=SMALL_GROUPS | {"layer_pattern": "GGN"},
    place=16,
)
