"""One table per architecture: our tensors and Hugging Face's, our options and theirs.

Shapes: h hidden, n heads, g groups of heads that share keys and values, d head dim, f ffn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from megazero.config.schema import ModelConfig
from megazero.model.kernels.rotary import HIGH_FREQUENCY, LOW_FREQUENCY, TRAINED_LENGTH

# Llama 3.1's scaling of rotary positions, but for its factor.
LLAMA_3 = {
    "rope_type": "llama3",
    "low_freq_factor": LOW_FREQUENCY,
    "high_freq_factor": HIGH_FREQUENCY,
    "original_max_position_embeddings": TRAINED_LENGTH,
}

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Form:
    """Conversion of one tensor of ours to one or more of theirs, and back. Results may be views."""

    split: Callable[[torch.Tensor, ModelConfig], Tensors]
    join: Callable[[Tensors, ModelConfig], torch.Tensor]


def _qkv_columns(x: torch.Tensor, model: ModelConfig) -> Tensors:
    """[n, 3, d, ...] -> [..., 3 n d], queries of all heads first."""
    rows = x.transpose(0, 1).reshape(-1, *x.shape[3:])
    return (rows.t() if rows.dim() == 2 else rows,)


def _qkv_heads(columns: Tensors, model: ModelConfig) -> torch.Tensor:
    """[..., 3 n d] -> [n, 3, d, ...]"""
    (x,) = columns
    rows = x.t() if x.dim() == 2 else x
    return rows.reshape(3, model.num_attention_heads, model.head_dim, *rows.shape[1:]).transpose(0, 1)


SAME = Form(lambda x, _: (x,), lambda xs, _: xs[0])
TRANSPOSED = Form(lambda x, _: (x.t(),), lambda xs, _: xs[0].t())  # Conv1D multiplies x [.., in] with [in, out]
FUSED_QKV = Form(_qkv_columns, _qkv_heads)
HEADS = Form(  # [n, d, ...] and [n d, ...]
    lambda x, _: (x.flatten(0, 1),),
    lambda xs, model: xs[0].unflatten(0, (model.num_attention_heads, -1)),
)
KEYS_AND_VALUES = Form(  # [g, 2, d, ...] and two [g d, ...]
    lambda x, _: tuple(part.flatten(0, 1) for part in x.unbind(1)),
    lambda xs, model: torch.stack([x.unflatten(0, (model.query_groups, -1)) for x in xs], dim=1),
)
STACKED = Form(lambda x, _: x.unbind(0), lambda xs, _: torch.stack(list(xs)))


@dataclass(frozen=True)
class Row:
    """A tensor of ours, and those of theirs that hold it. `{}` is the number of the block."""

    ours: str
    theirs: tuple[str, ...]
    form: Form = SAME


@dataclass(frozen=True)
class Architecture:
    """An architecture on both sides.

    Attributes:
        model_type, model_class: of config.json.
        prefix: of the base model, which files of the base model alone lack.
        output: the output matrix; files of a tied model may hold it, and it is not read.
        buffers: ends of names that old files hold besides weights.
        to_config: our options as their configuration. (model, end-of-document id)
        from_config: the reverse, as fields of ModelConfig. ValueError where ours computes something else.
    """

    model_type: str
    model_class: str
    prefix: str
    output: str
    rows: tuple[Row, ...]
    buffers: tuple[str, ...]
    to_config: Callable[[ModelConfig, int | None], PreTrainedConfig]
    from_config: Callable[[PreTrainedConfig], dict[str, Any]]

    def row(self, name: str) -> Row:
        """The row of a tensor of ours, with its block's number."""
        for row in self.rows:
            head, found, tail = row.ours.partition("{}")
            number = name[len(head) : len(name) - len(tail)]
            if name == row.ours or (found and name.startswith(head) and name.endswith(tail) and number.isdecimal()):
                return Row(name, tuple(theirs.format(number) for theirs in row.theirs), row.form)
        raise AssertionError(f"{name} is in no table of {self.model_type}")


def _require(config: PreTrainedConfig, wanted: dict[str, tuple[Any, ...]]) -> None:
    """Refuse options of theirs that ours does not compute."""
    for key, values in wanted.items():
        found = getattr(config, key, values[0])
        if found not in values:
            can = " or ".join(map(str, values))
            raise ValueError(f"config.json has {key} {found}; this version computes {can} only")


# -- GPT-2


def _gpt2_config(model: ModelConfig, eod: int | None) -> PreTrainedConfig:
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=model.vocab_size,
        n_positions=model.seq_length,
        n_embd=model.hidden_size,
        n_layer=model.num_layers,
        n_head=model.num_attention_heads,
        n_inner=model.ffn_size,
        activation_function="gelu_new",
        layer_norm_epsilon=model.norm_epsilon,
        embd_pdrop=model.hidden_dropout,
        resid_pdrop=model.hidden_dropout,
        attn_pdrop=model.attention_dropout,
        initializer_range=model.init_method_std,
        tie_word_embeddings=not model.untie_embeddings,
        bos_token_id=eod,
        eos_token_id=eod,
    )


def _gpt2_options(config: PreTrainedConfig) -> dict[str, Any]:
    _require(
        config,
        {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
    )
    return {
        "num_layers": config.n_layer,
        "hidden_size": config.n_embd,
        "ffn_hidden_size": config.n_inner or 4 * config.n_embd,
        "num_attention_heads": config.n_head,
        "seq_length": config.n_positions,
        "vocab_size": config.vocab_size,
        "attention_dropout": float(config.attn_pdrop),
        "hidden_dropout": float(config.resid_pdrop),
        "init_method_std": float(config.initializer_range),
        "untie_embeddings": not config.tie_word_embeddings,
        "norm_epsilon": float(config.layer_norm_epsilon),
    }


def _gpt2_rows() -> tuple[Row, ...]:
    rows = [
        Row("token_embedding.weight", ("transformer.wte.weight",)),
        Row("position_embedding.weight", ("transformer.wpe.weight",)),
    ]
    for kind in ("weight", "bias"):
        matrix = TRANSPOSED if kind == "weight" else SAME
        for ours, theirs, form in (
            ("norm1", "ln_1", SAME),
            ("attention.qkv", "attn.c_attn", FUSED_QKV),
            ("attention.proj", "attn.c_proj", matrix),
            ("norm2", "ln_2", SAME),
            ("mlp.up", "mlp.c_fc", matrix),
            ("mlp.down", "mlp.c_proj", matrix),
        ):
            rows.append(Row(f"blocks.{{}}.{ours}.{kind}", (f"transformer.h.{{}}.{theirs}.{kind}",), form))
        rows.append(Row(f"head.norm.{kind}", (f"transformer.ln_f.{kind}",)))
    return (*rows, Row("head.output.weight", ("lm_head.weight",)))


# -- Llama, and Qwen 2, which has biases of queries, keys and values


def _rope_parameters(model: ModelConfig) -> dict[str, Any]:
    if model.rope_scaling_factor == 1.0:
        return {"rope_type": "default", "rope_theta": model.rotary_base}
    return {"rope_theta": model.rotary_base, "factor": model.rope_scaling_factor} | LLAMA_3


def _llama_config(model: ModelConfig, eod: int | None) -> PreTrainedConfig:
    from transformers import LlamaConfig, Qwen2Config

    return (Qwen2Config if model.add_qkv_bias else LlamaConfig)(
        vocab_size=model.vocab_size,
        max_position_embeddings=model.seq_length,
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.query_groups,
        rms_norm_eps=model.norm_epsilon,
        rope_parameters=_rope_parameters(model),
        attention_dropout=model.attention_dropout,
        initializer_range=model.init_method_std,
        tie_word_embeddings=not model.untie_embeddings,
        bos_token_id=eod,
        eos_token_id=eod,
    )


def _llama_options(config: PreTrainedConfig) -> dict[str, Any]:
    heads = config.num_attention_heads
    _require(
        config,
        {
            "hidden_act": ("silu",),
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "use_sliding_window": (False,),
            "head_dim": (config.hidden_size // heads, None),
        },
    )
    rope = dict(config.rope_parameters)
    base, factor = float(rope.pop("rope_theta")), float(rope.pop("factor", 1.0))
    rope = {key: value for key, value in rope.items() if value is not None}
    if rope not in ({"rope_type": "default"}, LLAMA_3):
        raise ValueError(
            f"config.json has rope_parameters {rope}; this version computes default and llama 3.1's rotary positions "
            f"({LLAMA_3}) only"
        )
    return {
        "architecture": "llama",
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": heads,
        "num_query_groups": config.num_key_value_heads,
        "add_qkv_bias": config.model_type == "qwen2",
        "seq_length": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "rotary_base": base,
        "rope_scaling_factor": factor if rope == LLAMA_3 else 1.0,
        "norm_epsilon": float(config.rms_norm_eps),
        "attention_dropout": float(config.attention_dropout),
        "init_method_std": float(config.initializer_range),
        "untie_embeddings": not config.tie_word_embeddings,
    }


def _llama_rows() -> tuple[Row, ...]:
    rows = [Row("token_embedding.weight", ("model.embed_tokens.weight",))]
    for ours, theirs, form in (
        ("norm1.weight", ("input_layernorm.weight",), SAME),
        ("attention.query.weight", ("self_attn.q_proj.weight",), HEADS),
        ("attention.query.bias", ("self_attn.q_proj.bias",), HEADS),
        ("attention.kv.weight", ("self_attn.k_proj.weight", "self_attn.v_proj.weight"), KEYS_AND_VALUES),
        ("attention.kv.bias", ("self_attn.k_proj.bias", "self_attn.v_proj.bias"), KEYS_AND_VALUES),
        ("attention.proj.weight", ("self_attn.o_proj.weight",), SAME),
        ("norm2.weight", ("post_attention_layernorm.weight",), SAME),
        ("mlp.up.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), STACKED),
        ("mlp.down.weight", ("mlp.down_proj.weight",), SAME),
    ):
        rows.append(Row(f"blocks.{{}}.{ours}", tuple(f"model.layers.{{}}.{name}" for name in theirs), form))
    return (*rows, Row("head.norm.weight", ("model.norm.weight",)), Row("head.output.weight", ("lm_head.weight",)))


def _llama(model_type: str, model_class: str) -> Architecture:
    buffers = (".rotary_emb.inv_freq",)
    return Architecture(
        model_type, model_class, "model.", "lm_head.weight", _llama_rows(), buffers, _llama_config, _llama_options
    )


def architecture_of(model: ModelConfig) -> Architecture:
    """The architecture of theirs that computes what `model` does. ValueError if there is none."""
    name = "qwen2" if model.architecture == "llama" and model.add_qkv_bias else model.architecture
    if name not in ARCHITECTURES:
        raise ValueError(
            f"--architecture {name}: no table says how it is written for Hugging Face; see docs/extending.md"
        )
    return ARCHITECTURES[name]


ARCHITECTURES = {  # by model_type
    "llama": _llama("llama", "LlamaForCausalLM"),
    "qwen2": _llama("qwen2", "Qwen2ForCausalLM"),
    "gpt2": Architecture(
        "gpt2",
        "GPT2LMHeadModel",
        "transformer.",
        "lm_head.weight",
        _gpt2_rows(),
        (".attn.bias", ".attn.masked_bias"),
        _gpt2_config,
        _gpt2_options,
    ),
}
