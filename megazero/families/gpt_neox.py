"""GPT-NeoX, as Pythia."""

from megazero.families.parts.family import Family, Published
from megazero.families.parts.model_types import ACTIVATIONS, OUTPUT, QKV_BY_HEAD, SAME, HuggingFaceModel
from megazero.families.parts.relatives import LLAMA_OPTIONS, ROTATED
from megazero.families.parts.rope_scaling import PARTIAL_ROTARY
from megazero.families.parts.tensor_names import tensor_rows, weight_and_bias

FAMILY = Family(
    "gpt-neox",
    ROTATED | {"parallel_norms": 2, "activation": "gelu", "untie_embeddings": True, "rotary_percent": 0.25},
    (
        HuggingFaceModel(
            model_type="gpt_neox",
            model_class="GPTNeoXForCausalLM",
            prefix="gpt_neox.",
            tensors=tensor_rows(
                {
                    "token_embedding.weight": "gpt_neox.embed_in.weight",
                    "head.norm.weight": "gpt_neox.final_layer_norm.weight",
                    "head.norm.bias": "gpt_neox.final_layer_norm.bias",
                    "head.output.weight": "embed_out.weight",
                },
                "gpt_neox.layers.{}.",
                weight_and_bias("norm", SAME, "input_layernorm"),
                {
                    (f"attention.query.{kind}", f"attention.kv.{kind}"): (
                        *(QKV_BY_HEAD, f"attention.query_key_value.{kind}"),
                    )
                    for kind in ("weight", "bias")
                },
                weight_and_bias("attention.proj", SAME, "attention.dense"),
                weight_and_bias("mlp_norm", SAME, "post_attention_layernorm"),
                weight_and_bias("mlp.up", SAME, "mlp.dense_h_to_4h"),
                weight_and_bias("mlp.down", SAME, "mlp.dense_4h_to_h"),
            )
            # as their class names it in memory, and our earlier exports
            + tensor_rows({"head.output.weight": OUTPUT}, ""),
            options={name: theirs for name, theirs in LLAMA_OPTIONS.items() if name != "num_query_groups"}
            | {"norm_epsilon": "layer_norm_eps", "hidden_dropout": "hidden_dropout"},
            conversions=(PARTIAL_ROTARY,),
            activations=ACTIVATIONS,
            required={"attention_bias": (True,), "use_parallel_residual": (True,)},
            buffers=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
        ),
    ),
    published={
        "pythia-160m": Published(162_322_944, (12, 768, 12, 3072, 12, 50304, 2048)),
        "pythia-1.4b": Published(1_414_647_808, (24, 2048, 16, 8192, 16, 50304, 2048)),
    },
    small={"rotary_percent": 0.34, "untie_embeddings": True},
    place=23,
)
