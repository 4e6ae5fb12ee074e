"""Conversion of models of Hugging Face: names of tensors and options on both sides.

Shapes: h hidden, n heads, g groups of heads that share keys and values, d head dim, f ffn, E experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from megazero.engine.options.model_options import ModelOptions

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

Tensors: TypeAlias = "Sequence[torch.Tensor]"
Options = dict[str, Any]

OUTPUT = "lm_head.weight"
TABLE, HEAD = "token_embedding.weight", "head.output.weight"  # of ours; one weight if embeddings are tied
# Fields of ModelOptions whose value theirs has from a property: most have a default 0 that stands for it.
RESOLVED = {"ffn_hidden_size": "ffn_size", "num_query_groups": "query_groups", "moe_ffn_hidden_size": "expert_size"}
RESOLVED |= {"seq_length": "max_positions"}
# Fields that change no result of a trained model.
OF_TRAINING = {"architecture", "hidden_dropout", "attention_dropout", "init_method_std", "max_position_embeddings"}
OF_TRAINING |= {"moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate"}
OF_TRAINING |= {"mtp_num_layers", "mtp_loss_scaling_factor"}  # an export leaves modules out that it has no place for
# Beginnings of names in a block, in a module of multi-token prediction, and of its own weights in the rows of a block.
BLOCK, MODULE, IN_MODULE = "blocks.{}.", "head.mtp.{}.", "mtp."


@dataclass(frozen=True)
class Form:
    """Conversion of some of our tensors to some of theirs, and back. Results may be views.

    Attributes:
        by_rows: rows of one of ours are rows of one of theirs.
    """

    split: Callable[[Tensors, ModelOptions], Tensors]
    join: Callable[[Tensors, ModelOptions], Tensors]
    by_rows: bool = False


def _joined(parts: Tensors, dim: int = 0) -> torch.Tensor:
    import torch  # a command line is read without it

    return torch.cat(list(parts), dim)


def _stacked(parts: Tensors, dim: int = 0) -> torch.Tensor:
    import torch

    return torch.stack(list(parts), dim)


def _qkv_columns(ours: Tensors, model: ModelOptions) -> Tensors:
    """[n, 3, d, ...] -> [..., 3 n d], queries of all heads first."""
    (x,) = ours
    rows = x.transpose(0, 1).reshape(-1, *x.shape[3:])
    return (rows.t() if rows.dim() == 2 else rows,)


def _qkv_heads(theirs: Tensors, model: ModelOptions) -> Tensors:
    """[..., 3 n d] -> [n, 3, d, ...]"""
    (x,) = theirs
    rows = x.t() if x.dim() == 2 else x
    return (rows.reshape(3, model.num_attention_heads, model.head_dim, *rows.shape[1:]).transpose(0, 1),)


def _all_rows(ours: Tensors, model: ModelOptions) -> Tensors:
    """Queries [n, d, ...], keys and values [g, 2, d, ...] -> [(n + 2 g) d, ...]: all queries, all keys, all values."""
    query, kv = ours
    return (_joined([part.flatten(0, 1) for part in (query, *kv.unbind(1))]),)


def _by_kind(theirs: Tensors, model: ModelOptions) -> Tensors:
    heads = theirs[0].unflatten(0, (-1, model.head_dim))
    query, keys, values = heads.split([model.num_attention_heads, *[model.query_groups] * 2])
    return query, _stacked([keys, values], dim=1)


def _rows_by_head(ours: Tensors, model: ModelOptions) -> Tensors:
    """Queries [n, d, ...], keys and values [n, 2, d, ...] -> [n 3 d, ...]: a head's query, key and value together."""
    query, kv = ours
    return (_joined([query[:, None], kv], dim=1).flatten(0, 2),)


def _from_heads(theirs: Tensors, model: ModelOptions) -> Tensors:
    heads = theirs[0].unflatten(0, (model.num_attention_heads, 3, model.head_dim))
    return heads[:, 0], heads[:, 1:]


def _transposed(xs: Tensors, _: ModelOptions) -> Tensors:
    return (xs[0].t(),)


SAME = Form(lambda xs, _: xs, lambda xs, _: xs, by_rows=True)
TRANSPOSED = Form(_transposed, _transposed)  # Conv1D multiplies x [.., in] with [in, out]
QKV_COLUMNS = Form(_qkv_columns, _qkv_heads)
QKV_ROWS = Form(_all_rows, _by_kind)
QKV_BY_HEAD = Form(_rows_by_head, _from_heads)
HEADS = Form(  # [n, d, ...] and [n d, ...]
    lambda xs, _: (xs[0].flatten(0, 1),),
    lambda xs, model: (xs[0].unflatten(0, (model.num_attention_heads, -1)),),
)
KEYS_AND_VALUES = Form(  # [g, 2, d, ...] and two [g d, ...]
    lambda xs, _: tuple(part.flatten(0, 1) for part in xs[0].unbind(1)),
    lambda xs, model: (_stacked([x.unflatten(0, (model.query_groups, -1)) for x in xs], dim=1),),
)
# Activations of ours -> names of theirs, of MLPs with two matrices and of gated ones.
TANH_GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh", "gelu_accurate")
ACTIVATIONS = {"gelu": ("gelu", "gelu_python"), "gelu-tanh": TANH_GELU, "relu": ("relu",), "squared-relu": ("relu2",)}
GATED_ACTIVATIONS = {"swiglu": ("silu", "swish"), "geglu-tanh": TANH_GELU}
STACKED = Form(lambda xs, _: xs[0].unbind(0), lambda xs, _: (_stacked(xs),))  # [2, f, ...] and two [f, ...]
HALVES = Form(lambda xs, _: (xs[0].flatten(0, 1),), lambda xs, _: (xs[0].unflatten(0, (2, -1)),))  # [2 f, ...]
EXPERT = Form(lambda xs, _: xs[0][0].unbind(0), lambda xs, _: (_stacked(xs)[None],))  # [1, 2, f, h] and two
TRANSPOSED_EXPERTS = Form(  # [E, h, f] and [E, f, h]
    lambda xs, _: (xs[0].transpose(1, 2),), lambda xs, _: (xs[0].transpose(1, 2),), by_rows=True
)
EXPERTS_PAIRS = Form(  # [E, 2, f, ...] and [E, ..., 2 f]: gate and value of an inner element together
    lambda xs, _: (xs[0].movedim((2, 1), (-2, -1)).flatten(-2),),
    lambda xs, _: (xs[0].unflatten(-1, (-1, 2)).movedim((-2, -1), (2, 1)),),
    by_rows=True,
)
EXPERTS_HALVES = Form(  # [E, 2, f, h] and [E, 2 f, h]
    lambda xs, _: (xs[0].flatten(1, 2),), lambda xs, _: (xs[0].unflatten(1, (2, -1)),), by_rows=True
)


def pattern_of(letters: str) -> str:
    """Return the shortest pattern that repeats to `letters`."""
    sizes = range(1, len(letters) + 1)
    return next(letters[:n] for n in sizes if (letters[:n] * len(letters))[: len(letters)] == letters)


def _canonical_experts(model: ModelOptions) -> Options:
    """Return the options of experts with the defaults where they change nothing."""
    if not model.expert_layers:
        names = [field.name for field in fields(ModelOptions) if field.name.startswith("moe_")]
        return {"num_experts": 0} | {name: getattr(ModelOptions, name) for name in names}
    gate = model.moe_shared_expert_gate and model.moe_shared_expert_intermediate_size > 0
    found: Options = {"moe_shared_expert_gate": gate}
    if all(map(model.has_experts, range(model.num_layers))):  # no MLP but those of experts
        return found | {"moe_layer_freq": "1", "ffn_hidden_size": model.expert_size, "moe_ffn_hidden_size": 0}
    letters = "".join("DE"[model.has_experts(number)] for number in range(model.num_layers))
    width = 0 if model.expert_size == model.ffn_size else model.expert_size
    return found | {"moe_layer_freq": pattern_of(letters), "moe_ffn_hidden_size": width}


def attention_kinds(model: ModelOptions) -> str:
    """Return the kinds of attention of all layers."""
    return "".join(map(model.attention_kind, range(model.num_layers)))


def canonical(model: ModelOptions) -> ModelOptions:
    """Return the model with defaults for widths and groups that are the usual ones, and for experts without effect."""
    usual = model.hidden_size // model.num_attention_heads
    heads = 0 if model.head_dim == usual or model.multi_latent_attention else model.head_dim
    positions = 0 if model.max_positions == model.seq_length else model.max_positions
    groups = model.query_groups % model.num_attention_heads
    model = replace(model, kv_channels=heads, num_query_groups=groups, max_position_embeddings=positions)
    return replace(model, **_canonical_experts(model))


def _in_block(ours: str, model: ModelOptions) -> str:
    """Return a name in a module of multi-token prediction as that in a block behind the last one; others unchanged."""
    found = re.fullmatch(re.escape(MODULE).replace(r"\{\}", r"(\d+)") + "(block[.])?(.+)", ours)
    if found is None:
        return ours
    return BLOCK.format(model.num_layers + int(found[1])) + ("" if found[2] else IN_MODULE) + found[3]


def _in_module(named: str, model: ModelOptions) -> str:
    """Undo `_in_block`."""
    _, number, rest = named.split(".", 2)
    within = rest.removeprefix(IN_MODULE) if rest.startswith(IN_MODULE) else f"block.{rest}"
    return MODULE.format(int(number) - model.num_layers) + within


@dataclass(frozen=True)
class TensorNames:
    """Some of our tensors, and those of theirs that hold them. `{}` is the number of the block.

    Attributes:
        expert: the row of ours that theirs hold, whose names have `{expert}`. None: they hold all rows.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    form: Form = SAME
    expert: int | None = None

    @property
    def rows(self) -> slice:
        return slice(None) if self.expert is None else slice(self.expert, self.expert + 1)

    def numbered(self, number: str, num_experts: int) -> list[TensorNames]:
        """Return the row of a block, or those of its experts."""
        each = range(num_experts) if "{expert}" in self.theirs[0] else (None,)
        ours = tuple(name.format(number) for name in self.ours)
        return [
            TensorNames(ours, tuple(name.format(number, expert=expert) for name in self.theirs), self.form, expert)
            for expert in each
        ]


class Conversion(NamedTuple):
    """Conversion of options that have another form on each side.

    Attributes:
        expressed: the fields of ModelOptions that `to_theirs` reads.
        to_theirs: returns fields of their configuration.
        to_ours: returns fields of ModelOptions. ValueError if their configuration asks for another computation.
    """

    expressed: tuple[str, ...]
    to_theirs: Callable[[ModelOptions], Options]
    to_ours: Callable[[PreTrainedConfig], Options]


@dataclass(frozen=True)
class HuggingFaceModel:
    """A class of models on both sides.

    Attributes:
        model_type, model_class: of config.json.
        prefix: begins the base model's names; files of the base model alone lack it.
        tensors: rows of names. Files can hold the tensors of any row of ours; an export writes those of the first.
        options: fields of ModelOptions -> fields of their configuration with the same value.
        conversions: for other options. All other fields of ModelOptions have their defaults, or `needed`.
        required: fields of their configuration -> the values that ours computes; the first is that of a missing field.
        needed: fields of ModelOptions -> the value that all its models have.
        kinds: letters of --layer-pattern that its layers can have.
        buffers: ends of names in old files that are not weights.
        ignored: fields of their configuration that their model does not use.
        expert_bias: name of the biases of a router, by which it balances experts; empty: it has none.
        further_layers: files may hold layers after the last one, which transformers ignores.
        predicts: these are modules of multi-token prediction, and `tensors` has their names.
        activation_key: field of their configuration that names the activation.
        activations: activations of ours -> its names; an export has the first. Empty: that of the family alone.
        class_options: fields of ModelOptions with the defaults of its class, where those of the family differ.
        architecture: the family, which an import gives. A model of another one with the same traits is exported too.
        traits: the family's.
    """

    model_type: str
    model_class: str
    prefix: str
    tensors: tuple[TensorNames, ...]
    options: dict[str, str]
    conversions: tuple[Conversion, ...]
    required: Mapping[str, tuple[Any, ...]]
    needed: Options = field(default_factory=dict)
    kinds: str = "G"
    buffers: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    expert_bias: str = ""
    further_layers: bool = False
    predicts: bool = False
    activation_key: str = "hidden_act"
    activations: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    class_options: Options = field(default_factory=dict)
    architecture: str = ""
    traits: Options = field(default_factory=dict)

    def bias_names(self, model: ModelOptions) -> dict[int, str]:
        """Return the names of their routers' biases by number of the layer."""
        return {number: self.expert_bias.format(number) for number in model.expert_layers if self.expert_bias}

    def names(self, ours: str, model: ModelOptions, held: Container[str] = ()) -> list[TensorNames]:
        """Return the rows of one of our tensors, of its block: one, or one for each expert.

        held: names of theirs. The row is the first with one of them, or else the first.
        """
        named = _in_block(ours, model)
        number = re.search(r"\.(\d+)\.", named)
        general = re.sub(r"\.\d+\.", ".{}.", named)
        found = [
            row.numbered(number[1] if number else "", model.num_experts) for row in self.tensors if general in row.ours
        ]
        rows = next((rows for rows in found if any(name in held for row in rows for name in row.theirs)), found[0])
        if named == ours:
            return rows
        return [replace(row, ours=tuple(_in_module(name, model) for name in row.ours)) for row in rows]

    def head_names(self) -> list[str]:
        """Return the names under which files can hold the output head."""
        return [row.theirs[0] for row in self.tensors if HEAD in row.ours]

    def split(
        self, ours: Mapping[str, torch.Tensor], model: ModelOptions, held: Container[str] = ()
    ) -> dict[str, torch.Tensor]:
        """Return all of our tensors, or gradients of them, under their names and in their shapes. held: see `names`."""
        found: dict[str, torch.Tensor] = {}
        for row in dict.fromkeys(row for name in ours for row in self.names(name, model, held)):
            parts = row.form.split([ours[name][row.rows] for name in row.ours], model)
            found |= dict(zip(row.theirs, parts, strict=True))
        return found

    def join(
        self, theirs: Mapping[str, torch.Tensor], names: Iterable[str], model: ModelOptions
    ) -> dict[str, torch.Tensor]:
        """Return our tensors of these names, made of theirs."""
        found: dict[str, list[torch.Tensor]] = {}
        for row in dict.fromkeys(row for name in names for row in self.names(name, model, theirs)):
            for name, part in zip(row.ours, row.form.join([theirs[name] for name in row.theirs], model), strict=True):
                found.setdefault(name, []).append(part)
        return {name: parts[0] if len(parts) == 1 else _joined(parts) for name, parts in found.items()}

    def differences(self, model: ModelOptions) -> list[str]:
        """Return the fields of `model` that this family cannot have."""
        usual = self.traits | self.needed
        found = [] if model.activation in (self.activations or {usual["activation"]}) else ["activation"]
        free = {*self.options, *OF_TRAINING, "untie_embeddings", "activation"}.union(
            *(each.expressed for each in self.conversions)
        )
        model = canonical(model)
        if "num_experts" in free and not model.num_experts:
            found.append("num_experts")
        for each in fields(ModelOptions):
            if each.name not in free and getattr(model, each.name) != usual.get(each.name, each.default):
                found.append(each.name)
        if not set(attention_kinds(model)) <= set(self.kinds):
            found = list(dict.fromkeys([*found, "layer_pattern"]))
        return found

    def to_config(self, model: ModelOptions, ends: int | list[int] | None) -> PreTrainedConfig:
        """Return the model's options as their configuration. ends: ids of tokens that end a text."""
        from transformers import AutoConfig

        values = {theirs: getattr(model, RESOLVED.get(ours, ours)) for ours, theirs in self.options.items()}
        values |= {"tie_word_embeddings": not model.untie_embeddings}
        values |= {"bos_token_id": None, "eos_token_id": ends, "pad_token_id": None}  # theirs may exceed our vocabulary
        if self.activations:
            values[self.activation_key] = self.activations[model.activation][0]
        return AutoConfig.for_model(self.model_type, **values | self.converted(model))

    def converted(self, model: ModelOptions) -> Options:
        """Return the options that have another form there. ValueError if these cannot have a value of `model`."""
        found: Options = {}
        for conversion in self.conversions:
            found |= conversion.to_theirs(model)
        return found

    def from_config(self, config: PreTrainedConfig) -> Options:
        """Return the fields of ModelOptions. ValueError if their configuration asks for another computation."""
        for key, values in self.required.items():
            if (found := getattr(config, key, values[0])) not in values:
                can = " or ".join(map(str, values))
                raise ValueError(f"config.json has {key} {found}; this version computes {can} only")
        ours = {ours: getattr(config, theirs) for ours, theirs in self.options.items()}
        ours = {
            name: float(v) if v is not None and isinstance(getattr(ModelOptions, name), float) else v
            for name, v in ours.items()
        }
        ours |= {"architecture": self.architecture, "untie_embeddings": not config.tie_word_embeddings}
        ours |= self.traits | self.needed
        if not ours["learned_positions"]:
            ours["max_position_embeddings"] = ours["seq_length"]  # --seq-length does not change it
        if self.activations:
            ours["activation"] = self._activation(getattr(config, self.activation_key))
        for conversion in self.conversions:
            ours |= conversion.to_ours(config)
        if null := [theirs for name, theirs in self.options.items() if ours[name] is None]:
            raise ValueError(f"config.json has {null[0]} null, for which {self.model_class} has no value; give one")
        return ours

    def _activation(self, named: str) -> str:
        """Return --activation for a name of theirs. ValueError if this version does not compute it."""
        found = [ours for ours, names in self.activations.items() if named in names]
        if not found:
            can = ", ".join(name for names in self.activations.values() for name in names)
            raise ValueError(f"config.json has {self.activation_key} {named}; this version computes {can} only")
        return found[0]
