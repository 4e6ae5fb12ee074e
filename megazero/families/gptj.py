"""GPT-J."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megazero.families.parts.family import Family, Published
from megazero.families.parts.gpt import GPT_DROPOUT, GPT_OUTSIDE, GPT_ROW, GPT_WIDTH
from megazero.families.parts.model_types import HEADS, KEYS_AND_VALUES, SAME, Conversion, HuggingFaceModel, Options
from megazero.families.parts.relatives import SIDE_BY_SIDE
from megazero.families.parts.tensor_names import tensor_rows, weight_and_bias

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def _from_rotary_dim(config: PreTrainedConfig) -> Options:
    return {"rotary_percent": (config.rotary_dim or config.n_embd) / (config.n_embd // config.n_head)}


ROTARY_DIM = Conversion(("rotary_percent",), lambda model: {"rotary_dim": model.rotary_dim}, _from_rotary_dim)
FAMILY = Family(
    "gptj",
    SIDE_BY_SIDE
    | {
        "linear_biases": ("mlp", "logits"),
        "untie_embeddings": True,
        "rotary_percent": 0.25,
        "rotary_interleaved": True,
    },
    (
        HuggingFaceModel(
            model_type="gptj",
            model_class="GPTJForCausalLM",
            tensors=tensor_rows(
                GPT_OUTSIDE,
                "transformer.h.{}.",
                weight_and_bias("norm", SAME, "ln_1"),
                {
                    "attention.query.weight": (HEADS, "attn.q_proj.weight"),
                    "attention.kv.weight": (KEYS_AND_VALUES, "attn.k_proj.weight", "attn.v_proj.weight"),
                    "attention.proj.weight": (SAME, "attn.out_proj.weight"),
                },
                weight_and_bias("mlp.up", SAME, "mlp.fc_in"),
                weight_and_bias("mlp.down", SAME, "mlp.fc_out"),
            ),
            conversions=(GPT_WIDTH, GPT_DROPOUT, ROTARY_DIM),
            needed={"rotary_interleaved": True},
            **GPT_ROW,
        ),
    ),
    published={"gptj-6b": Published(6_050_882_784, (28, 4096, 16, 16384, 16, 50400, 2048))},
    small={"rotary_percent": 0.5, "rotary_interleaved": True, "untie_embeddings": True},
    place=24,
)
