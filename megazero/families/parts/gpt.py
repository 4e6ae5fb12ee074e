"""Parts of the rows of GPT-2 and GPT-J."""

from typing import Any

from megazero.families.parts.model_types import ACTIVATIONS, OUTPUT, TANH_GELU, Conversion
from megazero.families.parts.weight_conversions import equal_dropout

GPT_OUTSIDE = {
    "token_embedding.weight": "transformer.wte.weight",
    "position_embedding.weight": "transformer.wpe.weight",
    "head.norm.weight": "transformer.ln_f.weight",
    "head.norm.bias": "transformer.ln_f.bias",
    "head.output.weight": OUTPUT,
    "head.output_bias": "lm_head.bias",
}
GPT_ROW: dict[str, Any] = {
    "prefix": "transformer.",
    "options": {
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
    },
    "required": {
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    "buffers": (".attn.bias", ".attn.masked_bias"),
    "activation_key": "activation_function",
    "activations": ACTIVATIONS | {"gelu-tanh": ("gelu_new", *TANH_GELU)},
}
GPT_WIDTH = Conversion((), lambda model: {}, lambda config: {"ffn_hidden_size": config.n_inner or 4 * config.n_embd})
GPT_DROPOUT = equal_dropout("embd_pdrop", "resid_pdrop")
