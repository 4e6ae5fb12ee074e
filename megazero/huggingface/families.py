"""The families of models that Hugging Face's transformers has: one row of MODELS each.

Shapes: h hidden, n heads, g groups of heads that share keys and values, d head dim, f ffn.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megazero.config.flags import as_flag
from megazero.config.schema import ModelConfig
from megazero.huggingface.architectures import (
    HALVES,
    HEADS,
    KEYS_AND_VALUES,
    OUTPUT,
    QKV_BY_HEAD,
    QKV_COLUMNS,
    QKV_ROWS,
    SAME,
    STACKED,
    TRANSPOSED,
    Form,
    HuggingFaceModel,
    Options,
    TensorNames,
    require,
)
from megazero.huggingface.rotary import rope_parameters, rotary_options

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Names = dict[str | tuple[str, ...], tuple[Any, ...]]  # ours -> form, theirs

LOCAL, GLOBAL = "sliding_attention", "full_attention"
ROPE = ("rotary_base", "rope_scaling_factor", "rope_scaling_type", "rope_trained_length")
WINDOWS = ("window_size", "layer_pattern")


def _rows(outside: dict[str, str], block: str, *inside: Names) -> tuple[TensorNames, ...]:
    """Return the names of tensors outside and inside blocks, whose names of theirs begin with `block`."""
    rows = [TensorNames((ours,), (theirs,)) for ours, theirs in outside.items()]
    for names in inside:
        for key, (form, *theirs) in names.items():
            ours = (key,) if isinstance(key, str) else key
            rows.append(
                TensorNames(tuple(f"blocks.{{}}.{name}" for name in ours), tuple(block + name for name in theirs), form)
            )
    return tuple(rows)


def _both(ours: str, form: Form, *theirs: str) -> Names:
    """Return the names of a linear layer's weight and bias."""
    return {f"{ours}.{kind}": (form, *(f"{name}.{kind}" for name in theirs)) for kind in ("weight", "bias")}


def _same(**names: str) -> Names:
    return {name.replace("__", "."): (SAME, theirs) for name, theirs in names.items()}


# -- Windows and kinds of layers


def windows(model: ModelConfig) -> Options:
    """Return `sliding_window` and `layer_types`."""
    kinds = [LOCAL if model.attention_kind(i) == "L" else GLOBAL for i in range(model.num_layers)]
    return {"sliding_window": model.window_size or None, "layer_types": kinds}


def pattern_of(letters: str) -> str:
    """Return the shortest pattern that repeats to `letters`; empty if all are L or all are G."""
    if set(letters) <= {"L"} or set(letters) <= {"G"}:
        return ""
    sizes = range(1, len(letters) + 1)
    return next(letters[:n] for n in sizes if (letters[:n] * len(letters))[: len(letters)] == letters)


def from_windows(config: PreTrainedConfig) -> Options:
    """Return window_size and layer_pattern of `sliding_window` and `layer_types`."""
    size = config.sliding_window if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = [LOCAL if size else GLOBAL] * config.num_hidden_layers
    if unknown := set(kinds) - {LOCAL, GLOBAL}:
        raise ValueError(f"config.json has layer_types {min(unknown)}; this version computes {LOCAL} and {GLOBAL} only")
    letters = "".join("L" if kind == LOCAL and size else "G" for kind in kinds)
    return {"window_size": size if "L" in letters else 0, "layer_pattern": pattern_of(letters)}


def _window_of_all_layers(config: PreTrainedConfig) -> Options:
    """Return window_size of classes that have `sliding_window` without `layer_types`."""
    return {"window_size": config.sliding_window or 0}


# -- GPT-2, GPT-J


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
GPT_OUTSIDE = {
    "token_embedding.weight": "transformer.wte.weight",
    "position_embedding.weight": "transformer.wpe.weight",
    "head.norm.weight": "transformer.ln_f.weight",
    "head.norm.bias": "transformer.ln_f.bias",
    "head.output.weight": OUTPUT,
    "head.output_bias": "lm_head.bias",
}


def _gpt_to_theirs(model: ModelConfig) -> Options:
    return {"activation_function": "gelu_new", "embd_pdrop": model.hidden_dropout}


def _gpt_to_ours(config: PreTrainedConfig) -> Options:
    require(
        config,
        {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
    )
    if config.embd_pdrop != config.resid_pdrop:
        raise ValueError(
            f"config.json has embd_pdrop {config.embd_pdrop} and resid_pdrop {config.resid_pdrop}; this version "
            "computes equal ones only, which are --hidden-dropout"
        )
    return {"ffn_hidden_size": config.n_inner or 4 * config.n_embd}


def _gptj_to_theirs(model: ModelConfig) -> Options:
    return _gpt_to_theirs(model) | {"rotary_dim": int(model.head_dim * model.rotary_percent)}


def _gptj_to_ours(config: PreTrainedConfig) -> Options:
    head_dim = config.n_embd // config.n_head
    return _gpt_to_ours(config) | {"rotary_percent": (config.rotary_dim or config.n_embd) / head_dim}


GPT2 = HuggingFaceModel(
    "gpt2",
    "GPT2LMHeadModel",
    "gpt2",
    "transformer.",
    _rows(
        GPT_OUTSIDE,
        "transformer.h.{}.",
        _both("norm1", SAME, "ln_1"),
        _both("attention.qkv", QKV_COLUMNS, "attn.c_attn"),
        {
            "attention.proj.weight": (TRANSPOSED, "attn.c_proj.weight"),
            "attention.proj.bias": (SAME, "attn.c_proj.bias"),
        },
        _both("norm2", SAME, "ln_2"),
        {
            "mlp.up.weight": (TRANSPOSED, "mlp.c_fc.weight"),
            "mlp.up.bias": (SAME, "mlp.c_fc.bias"),
            "mlp.down.weight": (TRANSPOSED, "mlp.c_proj.weight"),
            "mlp.down.bias": (SAME, "mlp.c_proj.bias"),
        },
    ),
    GPT_OPTIONS,
    _gpt_to_theirs,
    (),
    _gpt_to_ours,
    needed={},
    buffers=(".attn.bias", ".attn.masked_bias"),
)
GPTJ = HuggingFaceModel(
    "gptj",
    "GPTJForCausalLM",
    "gptj",
    "transformer.",
    _rows(
        GPT_OUTSIDE,
        "transformer.h.{}.",
        _both("norm", SAME, "ln_1"),
        {
            "attention.query.weight": (HEADS, "attn.q_proj.weight"),
            "attention.kv.weight": (KEYS_AND_VALUES, "attn.k_proj.weight", "attn.v_proj.weight"),
            "attention.proj.weight": (SAME, "attn.out_proj.weight"),
        },
        _both("mlp.up", SAME, "mlp.fc_in"),
        _both("mlp.down", SAME, "mlp.fc_out"),
    ),
    GPT_OPTIONS,
    _gptj_to_theirs,
    ("rotary_percent",),
    _gptj_to_ours,
    needed={"rotary_interleaved": True},
    buffers=(".attn.bias", ".attn.masked_bias"),
)


# -- GPT-NeoX, as Pythia


def _neox_to_theirs(model: ModelConfig) -> Options:
    return {"hidden_act": "gelu", "rope_parameters": rope_parameters(model, partial=True)}


def _neox_to_ours(config: PreTrainedConfig) -> Options:
    require(config, {"hidden_act": ("gelu",), "attention_bias": (True,), "use_parallel_residual": (True,)})
    return rotary_options(config.rope_parameters, partial=True)


NEOX = HuggingFaceModel(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    "gpt-neox",
    "gpt_neox.",
    _rows(
        {
            "token_embedding.weight": "gpt_neox.embed_in.weight",
            "head.norm.weight": "gpt_neox.final_layer_norm.weight",
            "head.norm.bias": "gpt_neox.final_layer_norm.bias",
            "head.output.weight": OUTPUT,
        },
        "gpt_neox.layers.{}.",
        _both("norm", SAME, "input_layernorm"),
        {
            (f"attention.query.{kind}", f"attention.kv.{kind}"): (QKV_BY_HEAD, f"attention.query_key_value.{kind}")
            for kind in ("weight", "bias")
        },
        _both("attention.proj", SAME, "attention.dense"),
        _both("mlp_norm", SAME, "post_attention_layernorm"),
        _both("mlp.up", SAME, "mlp.dense_h_to_4h"),
        _both("mlp.down", SAME, "mlp.dense_4h_to_h"),
    ),
    {
        "vocab_size": "vocab_size",
        "seq_length": "max_position_embeddings",
        "hidden_size": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_attention_heads": "num_attention_heads",
        "ffn_hidden_size": "intermediate_size",
        "norm_epsilon": "layer_norm_eps",
        "hidden_dropout": "hidden_dropout",
        "attention_dropout": "attention_dropout",
        "init_method_std": "initializer_range",
    },
    _neox_to_theirs,
    (*ROPE, "rotary_percent"),
    _neox_to_ours,
    needed={},
    buffers=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
)


# -- Llama and its relatives


LLAMA_OPTIONS = {
    "vocab_size": "vocab_size",
    "seq_length": "max_position_embeddings",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "ffn_hidden_size": "intermediate_size",
    "norm_epsilon": "rms_norm_eps",
    "attention_dropout": "attention_dropout",
    "init_method_std": "initializer_range",
}
LLAMA_OUTSIDE = {
    "token_embedding.weight": "model.embed_tokens.weight",
    "head.norm.weight": "model.norm.weight",
    "head.output.weight": OUTPUT,
}
BEFORE = _same(norm1__weight="input_layernorm.weight", norm2__weight="post_attention_layernorm.weight")
AFTER = _same(
    norm1_after__weight="post_attention_layernorm.weight", norm2_after__weight="post_feedforward_layernorm.weight"
)
AROUND = AFTER | _same(norm1__weight="input_layernorm.weight", norm2__weight="pre_feedforward_layernorm.weight")
ATTENTION = {
    **_both("attention.query", HEADS, "self_attn.q_proj"),
    **_both("attention.kv", KEYS_AND_VALUES, "self_attn.k_proj", "self_attn.v_proj"),
    **_same(
        attention__query_norm__weight="self_attn.q_norm.weight",
        attention__key_norm__weight="self_attn.k_norm.weight",
        attention__proj__weight="self_attn.o_proj.weight",
    ),
}
GATED_MLP: Names = {
    "mlp.up.weight": (STACKED, "mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.down.weight": (SAME, "mlp.down_proj.weight"),
}
PHI3_LAYERS: Names = {
    ("attention.query.weight", "attention.kv.weight"): (QKV_ROWS, "self_attn.qkv_proj.weight"),
    "attention.proj.weight": (SAME, "self_attn.o_proj.weight"),
    "mlp.up.weight": (HALVES, "mlp.gate_up_proj.weight"),
    "mlp.down.weight": (SAME, "mlp.down_proj.weight"),
}
NO_BIASES = {"attention_bias": (False,), "mlp_bias": (False,)}
SILU = NO_BIASES | {"hidden_act": ("silu",)}


def _head_dim(config: PreTrainedConfig) -> Options:
    usual = config.hidden_size // config.num_attention_heads
    found = getattr(config, "head_dim", None) or usual
    return {"kv_channels": 0 if found == usual else found}


def _llama(
    model_type: str,
    model_class: str,
    *,
    architecture: str = "",
    layers: Names = BEFORE | ATTENTION | GATED_MLP,
    options: dict[str, str] | None = None,
    needed: Options | None = None,
    required: dict[str, tuple[Any, ...]] = SILU,
    to_theirs: Callable[[ModelConfig], Options] = lambda model: {},
    expressed: tuple[str, ...] = (),
    kinds: str = "GL",
    to_ours: Callable[[PreTrainedConfig], Options] = lambda config: {},
    heads: bool = True,
    local_rope: bool = False,
) -> HuggingFaceModel:
    """Return a relative of Llama.

    Args:
        layers: names of the tensors in blocks.
        options, needed, expressed, kinds: besides Llama's; see `HuggingFaceModel`.
        required: of their configuration.
        to_theirs, to_ours: of options besides rotary positions and the width of heads.
        heads: whether it has heads of a width of their own.
        local_rope: whether rotary positions are given by kind of layer.
    """

    def theirs(model: ModelConfig) -> Options:
        rope = rope_parameters(model, "rotary_percent" in expressed, local_rope)
        return {"rope_parameters": rope} | ({"head_dim": model.head_dim} if heads else {}) | to_theirs(model)

    def ours(config: PreTrainedConfig) -> Options:
        require(config, required)
        rope = rotary_options(config.rope_parameters, "rotary_percent" in expressed)
        return (_head_dim(config) if heads else {}) | rope | to_ours(config)

    fields = (*ROPE, *expressed, *(["kv_channels"] if heads else []), *(["local_rotary_base"] if local_rope else []))
    return HuggingFaceModel(
        model_type,
        model_class,
        architecture or model_type,
        "model.",
        _rows(LLAMA_OUTSIDE, "model.layers.{}.", layers),
        LLAMA_OPTIONS | (options or {}),
        theirs,
        fields,
        ours,
        needed or {},
        kinds,
        buffers=(".rotary_emb.inv_freq",),
    )


def _qwen_windows(model: ModelConfig) -> Options:
    found = windows(model)
    first = [*found["layer_types"], LOCAL].index(LOCAL)  # readers without layer_types take the layers before as global
    return found | {"use_sliding_window": model.window_size > 0, "max_window_layers": first}


def _gemma_to_theirs(model: ModelConfig) -> Options:
    scalar = round(model.attention_scale**-2) if model.attention_scale else model.head_dim
    if model.attention_scale and not math.isclose(scalar**-0.5, model.attention_scale):
        raise ValueError(
            f"--attention-scale {model.attention_scale}: Gemma's is 1 / sqrt(N) of a whole N, such as {scalar**-0.5}"
        )
    return windows(model) | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": model.attention_softcap or None,
        "final_logit_softcapping": model.final_softcap or None,
    }


def _gemma_to_ours(config: PreTrainedConfig) -> Options:
    scalar = config.query_pre_attn_scalar
    return from_windows(config) | {
        "attention_scale": 0.0 if scalar == config.head_dim else scalar**-0.5,
        "attention_softcap": config.attn_logit_softcapping or 0.0,
        "final_softcap": config.final_logit_softcapping or 0.0,
    }


GEMMA: Options = {
    "layers": AROUND | ATTENTION | GATED_MLP,
    "required": NO_BIASES | {"hidden_activation": ("gelu_pytorch_tanh",), "use_bidirectional_attention": (None, False)},
    "to_theirs": _gemma_to_theirs,
    "expressed": (*WINDOWS, "attention_scale", "attention_softcap", "final_softcap"),
    "to_ours": _gemma_to_ours,
}
OLMO: Options = {
    "layers": AFTER | ATTENTION | GATED_MLP,
    "needed": {"qk_layernorm": True, "qk_norm_all_heads": True},
    "heads": False,
}


def _no_rope_layers(model: ModelConfig) -> Options:
    letters = [model.attention_kind(i) for i in range(model.num_layers)]
    return {"no_rope_layers": [int(letter != "N") for letter in letters], "layer_types": [GLOBAL] * model.num_layers}


def _from_no_rope_layers(config: PreTrainedConfig) -> Options:
    return {"layer_pattern": pattern_of("".join("G" if rotates else "N" for rotates in config.no_rope_layers))}


def _granite_to_ours(config: PreTrainedConfig) -> Options:
    head_dim = config.hidden_size // config.num_attention_heads
    usual = config.attention_multiplier == head_dim**-0.5
    return {"attention_scale": 0.0 if usual else float(config.attention_multiplier)}


MODELS = {
    model.model_type: model
    for model in (
        GPT2,
        GPTJ,
        NEOX,
        _llama("llama", "LlamaForCausalLM"),
        _llama(
            "mistral",
            "MistralForCausalLM",
            to_theirs=lambda model: {"sliding_window": model.window_size or None},
            expressed=("window_size",),
            to_ours=_window_of_all_layers,
        ),
        _llama(
            "ministral",
            "MinistralForCausalLM",
            architecture="mistral",
            to_theirs=windows,
            expressed=WINDOWS,
            to_ours=from_windows,
        ),
        _llama(
            "qwen2",
            "Qwen2ForCausalLM",
            needed={"add_qkv_bias": True},
            to_theirs=_qwen_windows,
            expressed=WINDOWS,
            to_ours=from_windows,
            heads=False,
        ),
        _llama(
            "qwen3",
            "Qwen3ForCausalLM",
            needed={"qk_layernorm": True},
            to_theirs=_qwen_windows,
            expressed=WINDOWS,
            to_ours=from_windows,
        ),
        _llama("olmo2", "Olmo2ForCausalLM", **OLMO),
        _llama(
            "olmo3",
            "Olmo3ForCausalLM",
            **OLMO,
            to_theirs=windows,
            expressed=WINDOWS,
            to_ours=from_windows,
            local_rope=True,
        ),
        _llama("gemma2", "Gemma2ForCausalLM", **GEMMA),
        _llama(
            "gemma3_text",
            "Gemma3ForCausalLM",
            architecture="gemma3",
            **GEMMA,
            needed={"qk_layernorm": True},
            local_rope=True,
        ),
        _llama(
            "phi3",
            "Phi3ForCausalLM",
            layers=BEFORE | PHI3_LAYERS,
            options={"hidden_dropout": "resid_pdrop"},
            to_theirs=lambda model: {
                "sliding_window": model.window_size or None,
                "embd_pdrop": model.hidden_dropout,
                "original_max_position_embeddings": model.seq_length,
            },
            expressed=("window_size", "rotary_percent"),
            to_ours=_window_of_all_layers,
            heads=False,
        ),
        _llama(
            "smollm3",
            "SmolLM3ForCausalLM",
            required=SILU | {"use_sliding_window": (False,)},
            to_theirs=_no_rope_layers,
            expressed=("layer_pattern",),
            kinds="GN",
            to_ours=_from_no_rope_layers,
            heads=False,
        ),
        _llama(
            "granite",
            "GraniteForCausalLM",
            options={
                "embedding_multiplier": "embedding_multiplier",
                "residual_multiplier": "residual_multiplier",
                "logits_divisor": "logits_scaling",
            },
            to_theirs=lambda model: {"attention_multiplier": model.attention_scale or model.head_dim**-0.5},
            expressed=("attention_scale",),
            to_ours=_granite_to_ours,
            heads=False,
        ),
    )
}


def family_of(model: ModelConfig) -> HuggingFaceModel:
    """Return the family that computes the same as `model`, that of its name or another. ValueError without one."""
    own = [each for each in MODELS.values() if each.architecture == model.architecture]
    for found in [*own, *MODELS.values()]:
        if not found.differences(model):
            return found
    if not own:
        raise ValueError(
            f"--architecture {model.architecture} has no table that converts it to Hugging Face; see docs/extending.md"
        )
    flags = [as_flag(name.replace("_", "-"), getattr(model, name)) for name in own[0].differences(model)]
    raise ValueError(f"no model of Hugging Face is a {own[0].model_type} with {', '.join(flags)}")
