"""StarCoder 2."""

from megazero.families.parts.family import Family, Published
from megazero.families.parts.model_types import ACTIVATIONS, SAME
from megazero.families.parts.relatives import ROTATED, SMALL_GROUPS, llama_row
from megazero.families.parts.rope_scaling import ROTARY
from megazero.families.parts.tensor_names import ATTENTION, LAYER_NORMS, same_forms, weight_and_bias
from megazero.families.parts.weight_conversions import OTHER_HEAD_DIM, WINDOW, equal_dropout

FAMILY = Family(
    "starcoder2",
    ROTATED | {"rotary_base": 1e6},
    (
        llama_row(
            "starcoder2",
            "Starcoder2ForCausalLM",
            *(ROTARY, OTHER_HEAD_DIM, WINDOW, equal_dropout("embedding_dropout", "residual_dropout")),
            layers=LAYER_NORMS
            | ATTENTION
            | same_forms(attention__proj__bias="self_attn.o_proj.bias")
            | weight_and_bias("mlp.up", SAME, "mlp.c_fc")
            | weight_and_bias("mlp.down", SAME, "mlp.c_proj"),
            options={"norm_epsilon": "norm_epsilon", "hidden_dropout": "residual_dropout"},
            activations=ACTIVATIONS,
            required={"use_bias": (True,)}
            | {"mlp_type": ("default",), "norm_type": ("layer_norm",)},  # of published files; their class has neither
        ),
    ),
    published={
        "starcoder2-3b": Published(
            3_030_371_328,
            (30, 3072, 24, 12288, 2, 49152, 16384),
            {"rotary_base": 999999.4420358813, "window_size": 4096, "init_method_std": 0.018042},
        )
    },
    small=SMALL_GROUPS | {"window_size": 5, "rotary_base": 5e3},
    place=26,
)
