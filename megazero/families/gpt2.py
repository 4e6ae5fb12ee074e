"""GPT-2. Its options are the defaults of all flags."""

from megazero.families.parts.family import Family, Published
from megazero.families.parts.gpt import GPT_DROPOUT, GPT_OUTSIDE, GPT_ROW, GPT_WIDTH
from megazero.families.parts.model_types import QKV_COLUMNS, SAME, TRANSPOSED, HuggingFaceModel
from megazero.families.parts.tensor_names import tensor_rows, weight_and_bias

FAMILY = Family(
    "gpt2",
    {},
    (
        HuggingFaceModel(
            model_type="gpt2",
            model_class="GPT2LMHeadModel",
            tensors=tensor_rows(
                GPT_OUTSIDE,
                "transformer.h.{}.",
                weight_and_bias("norm1", SAME, "ln_1"),
                weight_and_bias("attention.qkv", QKV_COLUMNS, "attn.c_attn"),
                {
                    "attention.proj.weight": (TRANSPOSED, "attn.c_proj.weight"),
                    "attention.proj.bias": (SAME, "attn.c_proj.bias"),
                },
                weight_and_bias("norm2", SAME, "ln_2"),
                {
                    "mlp.up.weight": (TRANSPOSED, "mlp.c_fc.weight"),
                    "mlp.up.bias": (SAME, "mlp.c_fc.bias"),
                    "mlp.down.weight": (TRANSPOSED, "mlp.c_proj.weight"),
                    "mlp.down.bias": (SAME, "mlp.c_proj.bias"),
                },
            ),
            conversions=(GPT_WIDTH, GPT_DROPOUT),
            **GPT_ROW,
        ),
    ),
    published={
        "gpt2-124m": Published(124_439_808, (12, 768, 12, 3072, 12, 50257, 1024)),
        "gpt2-345m": Published(354_823_168, (24, 1024, 16, 4096, 16, 50257, 1024)),
        "gpt2-1.5b": Published(1_557_611_200, (48, 1600, 25, 6400, 25, 50257, 1024)),
    },
    place=1,
)
