"""One table per architecture: our tensors and options, and those of Hugging Face.

Shapes: h hidden, n heads, g groups of heads that share keys and values, d head dim, f ffn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from megazero.config.schema import ModelConfig
from megazero.kernels.rotary import HIGH_FREQUENCY, LOW_FREQUENCY, TRAINED_LENGTH

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Tensors = Sequence[torch.Tensor]
Options = dict[str, Any]

OUTPUT = "lm_head.weight"  # files of a tied model may hold it
# Scaling of rotary positions in Llama 3.1, without its factor.
LLAMA_3 = {
    "rope_type": "llama3",
    "low_freq_factor": LOW_FREQUENCY,
    "high_freq_factor": HIGH_FREQUENCY,
    "original_max_position_embeddings": TRAINED_LENGTH,
}
# Fields of ModelConfig whose default 0 stands for the value of a property.
RESOLVED = {"ffn_hidden_size": "ffn_size", "num_query_groups": "query_groups"}
# --architecture of llama's layers, which options make another model for Hugging Face
LLAMAS = ("llama", "qwen3")


@dataclass(frozen=True)
class Form:
    """Conversion of one of our tensors to one or more of theirs, and back. Results may be views."""

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
class TensorNames:
    """One of our tensors, and those of theirs that hold it. `{}` is the number of the block."""

    ours: str
    theirs: tuple[str, ...]
    form: Form = SAME


@dataclass(frozen=True)
class HuggingFaceModel:
    """An architecture on both sides.

    Attributes:
        model_type, model_class: of config.json.
        flags: fields of ModelConfig in which architectures differ: its values, of which an import sets the first.
        prefix: of the base model's names, which files of the base model alone lack.
        tensors: our name -> names.
        buffers: ends of names in old files that are not weights.
        options: fields of ModelConfig -> fields of their configuration with the same value.
        to_theirs: the other fields of their configuration.
        to_ours: the other fields of ModelConfig. ValueError if their configuration asks for another computation.
    """

    model_type: str
    model_class: str
    flags: dict[str, tuple[Any, ...]]
    prefix: str
    tensors: dict[str, TensorNames]
    buffers: tuple[str, ...]
    options: dict[str, str]
    to_theirs: Callable[[ModelConfig], Options]
    to_ours: Callable[[PreTrainedConfig], Options]

    def names(self, ours: str) -> TensorNames:
        """Return the names of one of our tensors, with the number of its block."""
        found = self.tensors[re.sub(r"\.\d+\.", ".{}.", ours)]
        number = re.search(r"\.(\d+)\.", ours)
        return TensorNames(ours, tuple(name.format(number and number[1]) for name in found.theirs), found.form)

    def to_config(self, model: ModelConfig, eod: int | None) -> PreTrainedConfig:
        """Return the model's options as their configuration. eod: id of the end-of-document token."""
        from transformers import AutoConfig

        values = {theirs: getattr(model, RESOLVED.get(ours, ours)) for ours, theirs in self.options.items()}
        values |= {"tie_word_embeddings": not model.untie_embeddings, "bos_token_id": eod, "eos_token_id": eod}
        return AutoConfig.for_model(self.model_type, **values, **self.to_theirs(model))

    def from_config(self, config: PreTrainedConfig) -> Options:
        """Return the fields of ModelConfig. ValueError if their configuration asks for another computation."""
        ours = {ours: getattr(config, theirs) for ours, theirs in self.options.items()}
        ours = {name: float(v) if isinstance(getattr(ModelConfig, name), float) else v for name, v in ours.items()}
        ours |= {name: values[0] for name, values in self.flags.items()}
        return ours | {"untie_embeddings": not config.tie_word_embeddings} | self.to_ours(config)


def _require(config: PreTrainedConfig, wanted: dict[str, tuple[Any, ...]]) -> None:
    """Refuse options of theirs that ask for another computation. A missing option has the first of its values."""
    for key, values in wanted.items():
        found = getattr(config, key, values[0])
        if found not in values:
            can = " or ".join(map(str, values))
            raise ValueError(f"config.json has {key} {found}; this version computes {can} only")


def _tensors(outside: dict[str, str], block: str, inside: dict[str, tuple[Any, ...]]) -> dict[str, TensorNames]:
    """Return the names of tensors outside and inside blocks. `inside`: our name -> (form, names of theirs)."""
    rows = [TensorNames(ours, (theirs,)) for ours, theirs in (outside | {"head.output.weight": OUTPUT}).items()]
    for ours, (form, *theirs) in inside.items():
        rows.append(TensorNames(f"blocks.{{}}.{ours}", tuple(block + name for name in theirs), form))
    return {row.ours: row for row in rows}


# -- GPT-2


def _gpt2_to_theirs(model: ModelConfig) -> Options:
    if model.num_attention_heads * model.head_dim != model.hidden_size:
        raise ValueError(
            f"--kv-channels {model.kv_channels}: Hugging Face's GPT-2 has no heads of another width than --hidden-size "
            f"{model.hidden_size} / --num-attention-heads {model.num_attention_heads}"
        )
    return {"activation_function": "gelu_new", "embd_pdrop": model.hidden_dropout}


def _gpt2_to_ours(config: PreTrainedConfig) -> Options:
    _require(
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


GPT2 = HuggingFaceModel(
    "gpt2",
    "GPT2LMHeadModel",
    flags={"architecture": ("gpt2",)},
    prefix="transformer.",
    tensors=_tensors(
        {
            "token_embedding.weight": "transformer.wte.weight",
            "position_embedding.weight": "transformer.wpe.weight",
            "head.norm.weight": "transformer.ln_f.weight",
            "head.norm.bias": "transformer.ln_f.bias",
        },
        "transformer.h.{}.",
        {
            "norm1.weight": (SAME, "ln_1.weight"),
            "norm1.bias": (SAME, "ln_1.bias"),
            "attention.qkv.weight": (FUSED_QKV, "attn.c_attn.weight"),
            "attention.qkv.bias": (FUSED_QKV, "attn.c_attn.bias"),
            "attention.proj.weight": (TRANSPOSED, "attn.c_proj.weight"),
            "attention.proj.bias": (SAME, "attn.c_proj.bias"),
            "norm2.weight": (SAME, "ln_2.weight"),
            "norm2.bias": (SAME, "ln_2.bias"),
            "mlp.up.weight": (TRANSPOSED, "mlp.c_fc.weight"),
            "mlp.up.bias": (SAME, "mlp.c_fc.bias"),
            "mlp.down.weight": (TRANSPOSED, "mlp.c_proj.weight"),
            "mlp.down.bias": (SAME, "mlp.c_proj.bias"),
        },
    ),
    buffers=(".attn.bias", ".attn.masked_bias"),
    options={
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
    to_theirs=_gpt2_to_theirs,
    to_ours=_gpt2_to_ours,
)


# -- Llama; Qwen 2, which has biases of queries, keys and values; Qwen 3, which has norms of queries and keys


def _llama_to_theirs(model: ModelConfig) -> Options:
    scaling: Options = {"rope_type": "default"}
    if model.rope_scaling_factor != 1.0:
        scaling = {"factor": model.rope_scaling_factor} | LLAMA_3
    return {"rope_parameters": {"rope_theta": model.rotary_base} | scaling, "head_dim": model.head_dim}


def _llama_to_ours(config: PreTrainedConfig) -> Options:
    _require(
        config,
        {
            "hidden_act": ("silu",),
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "use_sliding_window": (False,),
        },
    )
    usual = config.hidden_size // config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or usual
    rope = dict(config.rope_parameters)
    base, factor = float(rope.pop("rope_theta")), float(rope.pop("factor", 1.0))
    rope = {key: value for key, value in rope.items() if value is not None}
    if rope not in ({"rope_type": "default"}, LLAMA_3):
        raise ValueError(
            f"config.json has rope_parameters {rope}; this version computes default and llama 3.1's rotary positions "
            f"({LLAMA_3}) only"
        )
    return {
        "kv_channels": 0 if head_dim == usual else head_dim,
        "rotary_base": base,
        "rope_scaling_factor": factor if rope == LLAMA_3 else 1.0,
    }


def _llama(
    model_type: str, model_class: str, architectures: tuple[str, ...] = LLAMAS, bias: bool = False, norms: bool = False
) -> HuggingFaceModel:
    return HuggingFaceModel(
        model_type,
        model_class,
        {"architecture": architectures, "add_qkv_bias": (bias,), "qk_layernorm": (norms,)},
        prefix="model.",
        tensors=_tensors(
            {"token_embedding.weight": "model.embed_tokens.weight", "head.norm.weight": "model.norm.weight"},
            "model.layers.{}.",
            {
                "norm1.weight": (SAME, "input_layernorm.weight"),
                "attention.query.weight": (HEADS, "self_attn.q_proj.weight"),
                "attention.query.bias": (HEADS, "self_attn.q_proj.bias"),
                "attention.kv.weight": (KEYS_AND_VALUES, "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
                "attention.kv.bias": (KEYS_AND_VALUES, "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
                "attention.query_norm.weight": (SAME, "self_attn.q_norm.weight"),
                "attention.key_norm.weight": (SAME, "self_attn.k_norm.weight"),
                "attention.proj.weight": (SAME, "self_attn.o_proj.weight"),
                "norm2.weight": (SAME, "post_attention_layernorm.weight"),
                "mlp.up.weight": (STACKED, "mlp.gate_proj.weight", "mlp.up_proj.weight"),
                "mlp.down.weight": (SAME, "mlp.down_proj.weight"),
            },
        ),
        buffers=(".rotary_emb.inv_freq",),
        options={
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
        },
        to_theirs=_llama_to_theirs,
        to_ours=_llama_to_ours,
    )


MODELS = {  # by model_type
    "llama": _llama("llama", "LlamaForCausalLM"),
    "qwen2": _llama("qwen2", "Qwen2ForCausalLM", bias=True),
    "qwen3": _llama("qwen3", "Qwen3ForCausalLM", LLAMAS[::-1], norms=True),
    "gpt2": GPT2,
}


def architecture_of(model: ModelConfig) -> HuggingFaceModel:
    """Return their architecture that computes the same as `model`. ValueError if there is none."""
    for found in MODELS.values():
        if all(getattr(model, name) in values for name, values in found.flags.items()):
            return found
    name = model.architecture
    if name in LLAMAS:
        raise ValueError(
            f"--architecture {name} with --add-qkv-bias and --qk-layernorm: no model of Hugging Face has both"
        )
    raise ValueError(f"--architecture {name} has no table that converts it to Hugging Face; see docs/extending.md")
