"""The rows of GPT-2 and GPT-J; `families` has all rows."""

from typing import Any

from megazero.interop.huggingface.model_types import (
    ACTIVATIONS,
    HEADS,
    KEYS_AND_VALUES,
    QKV_COLUMNS,
    SAME,
    TANH_GELU,
    TRANSPOSED,
    HuggingFaceModel,
)
from megazero.interop.huggingface.tensor_names import GPT_OUTSIDE, tensor_rows, weight_and_bias
from megazero.interop.huggingface.weight_conversions import GPT, GPT_DROPOUT, ROTARY_DIM

GPT_OPTIONS = {
    "vocab_size": "vocab_size",
    "seq_length": "n_positions",
    "hidden_size": "n_embd",
    "num_layers": "n_layer",
    "num_attention_heads": "n_head",
    "ffn_hidden_size": "n_inner",
    "norm_epsilon": "layer_norm_epsilon",
    "hidden_dropout": "resid_pdrop",
    "attention_dropout": "attn_pdrop",
    "init_method_std": "initializer_range",
}
GPT_REQUIRED: dict[str, tuple[Any, ...]] = {
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
GPT_ACTIVATION: dict[str, Any] = {
    "activation_key": "activation_function",
    "activations": ACTIVATIONS | {"gelu-tanh": ("gelu_new", *TANH_GELU)},
}
GPT2 = HuggingFaceModel(
    model_type="gpt2",
    model_class="GPT2LMHeadModel",
    architecture="gpt2",
    prefix="transformer.",
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
    options=GPT_OPTIONS,
    conversions=(GPT, GPT_DROPOUT),
    required=GPT_REQUIRED,
    needed={},
    buffers=(".attn.bias", ".attn.masked_bias"),
    **GPT_ACTIVATION,
)
GPTJ = HuggingFaceModel(
    model_type="gptj",
    model_class="GPTJForCausalLM",
    architecture="gptj",
    prefix="transformer.",
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
    options=GPT_OPTIONS,
    conversions=(GPT, GPT_DROPOUT, ROTARY_DIM),
    required=GPT_REQUIRED,
    needed={"rotary_interleaved": True},
    buffers=(".attn.bias", ".attn.masked_bias"),
    **GPT_ACTIVATION,
)
