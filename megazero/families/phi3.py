"""Phi-3."""

from megazero.engine.options.model_options import ModelOptions
from megazero.families.parts.family import Family, Published
from megazero.families.parts.model_types import QKV_ROWS, SAME, Conversion, Options
from megazero.families.parts.relatives import LLAMA, SMALL_GROUPS, llama_row
from megazero.families.parts.rope_scaling import PARTIAL_ROTARY
from megazero.families.parts.tensor_names import BEFORE, JOINED_MLP, Names
from megazero.families.parts.weight_conversions import OTHER_HEAD_DIM, WINDOW

LAYERS: Names = BEFORE | {
    ("attention.query.weight", "attention.kv.weight"): (QKV_ROWS, "self_attn.qkv_proj.weight"),
    "attention.proj.weight": (SAME, "self_attn.o_proj.weight"),
    **JOINED_MLP,
}


def _to_theirs(model: ModelOptions) -> Options:
    trained = model.max_positions if model.rope_scaling_factor == 1 else model.rope_trained_length
    return {"embd_pdrop": model.hidden_dropout, "original_max_position_embeddings": trained}


FAMILY = Family(
    "phi3",
    LLAMA | {"norm_epsilon": 1e-5},
    (
        llama_row(
            "phi3",
            "Phi3ForCausalLM",
            *(PARTIAL_ROTARY, OTHER_HEAD_DIM, WINDOW, Conversion((), _to_theirs, lambda config: {})),
            layers=LAYERS,
            options={"hidden_dropout": "resid_pdrop"},
        ),
    ),
    published={
        "phi3-mini-3.8b": Published(3_821_079_552, (32, 3072, 32, 8192, 32, 32064, 4096), {"window_size": 2047})
    },
    small=SMALL_GROUPS | {"window_size": 7, "rotary_percent": 0.5, "untie_embeddings": True},
    place=15,
)
