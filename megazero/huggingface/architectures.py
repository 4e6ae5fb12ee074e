"""One table per architecture: our tensors and Hugging Face's, our options and theirs.

Shapes: h hidden, n heads, d head dim, f ffn, v vocabulary, s sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from megazero.config.schema import ModelConfig

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
    rows = x.transpose(0, 1).reshape(3 * model.hidden_size, *x.shape[3:])
    return (rows.t() if rows.dim() == 2 else rows,)


def _qkv_heads(columns: Tensors, model: ModelConfig) -> torch.Tensor:
    """[..., 3 n d] -> [n, 3, d, ...]"""
    (x,) = columns
    n = model.num_attention_heads
    rows = x.t() if x.dim() == 2 else x
    return rows.reshape(3, n, model.hidden_size // n, *rows.shape[1:]).transpose(0, 1)


SAME = Form(lambda x, _: (x,), lambda xs, _: xs[0])
TRANSPOSED = Form(lambda x, _: (x.t(),), lambda xs, _: xs[0].t())  # Conv1D multiplies x [.., in] with [in, out]
FUSED_QKV = Form(_qkv_columns, _qkv_heads)


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


ARCHITECTURES = {
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
