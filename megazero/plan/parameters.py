"""Every parameter of the model: global name, global shape, sharded dim, decay, initial values, unit. Pure.

One table that the layers, the initial weights, the checkpoints and `estimate` all read.

A *unit* is what is gathered, reduced and updated together: a block, the token table, the position table, the head.
Shapes: h hidden, n heads, d head dim, f ffn, v vocabulary, s sequence.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from dataclasses import dataclass

from megazero.config.schema import ModelConfig
from megazero.plan.flat_layout import FlatLayout, FlatParam, flat_layout, round_up
from megazero.plan.topology import Layout

TOKEN_EMBEDDING, POSITION_EMBEDDING, HEAD = "token_embedding", "position_embedding", "head"
VOCABULARY_ALIGN = 64  # rows of a rank's part of the token table: keeps the logits' matrix product aligned


@dataclass(frozen=True)
class LocalBlock:
    """The part of a parameter that one tensor-parallel rank holds."""

    offset: tuple[int, ...]  # in the global tensor
    shape: tuple[int, ...]  # its true part: what is initialised, saved and loaded
    stored: tuple[int, ...]  # in memory: with the vocabulary's padding rows behind the true ones

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stored_numel(self) -> int:
        return math.prod(self.stored)


@dataclass(frozen=True)
class ParamSpec:
    """A parameter of the global model."""

    name: str  # "blocks.3.mlp.up.weight"
    shape: tuple[int, ...]  # of the global tensor, padding excluded
    tp_dim: int | None  # the dim that is sharded over tp; None: replicated
    decays: bool
    std: float = 0.0  # of the initial normal distribution
    mean: float = 0.0
    pads: bool = False  # rows are padded: the vocabulary
    trains: bool = True  # False: frozen; it has no gradient and does not decay

    def local(self, tp_size: int, tp_rank: int) -> LocalBlock:
        """The block of rank `tp_rank` of `tp_size`. Without padding, the sizes divide: `config` has seen to it."""
        offset, shape = [0] * len(self.shape), list(self.shape)
        if self.tp_dim is None:
            return LocalBlock(tuple(offset), self.shape, self.shape)
        whole = self.shape[self.tp_dim]
        each = -(-whole // tp_size)
        if self.pads:
            each = round_up(each, VOCABULARY_ALIGN)
        assert self.pads or each * tp_size == whole, (self.name, self.shape, tp_size)
        start = min(whole, tp_rank * each)
        offset[self.tp_dim], shape[self.tp_dim] = start, min(whole, start + each) - start
        stored = list(self.shape)
        stored[self.tp_dim] = each
        return LocalBlock(tuple(offset), tuple(shape), tuple(stored))


def block_specs(model: ModelConfig, layer: int) -> list[ParamSpec]:
    """The parameters of one transformer block."""
    h, n, f = model.hidden_size, model.num_attention_heads, model.ffn_size
    d, std = h // n, model.init_method_std
    residual_std = std / math.sqrt(2 * model.num_layers)  # GPT-2: the residual stream's variance stays put with depth

    def spec(name: str, shape: tuple[int, ...], tp_dim: int | None, std: float, mean: float = 0.0) -> ParamSpec:
        decays = name.endswith("weight") and "norm" not in name
        return ParamSpec(f"blocks.{layer}.{name}", shape, tp_dim, decays, std, mean)

    return [
        spec("norm1.weight", (h,), None, 0.0, 1.0),
        spec("norm1.bias", (h,), None, 0.0),
        spec("attention.qkv.weight", (n, 3, d, h), 0, std),
        spec("attention.qkv.bias", (n, 3, d), 0, 0.0),
        spec("attention.proj.weight", (h, h), 1, residual_std),
        spec("attention.proj.bias", (h,), None, 0.0),
        spec("norm2.weight", (h,), None, 0.0, 1.0),
        spec("norm2.bias", (h,), None, 0.0),
        spec("mlp.up.weight", (f, h), 0, std),
        spec("mlp.up.bias", (f,), 0, 0.0),
        spec("mlp.down.weight", (h, f), 1, residual_std),
        spec("mlp.down.bias", (h,), None, 0.0),
    ]


def stage_units(
    model: ModelConfig, layout: Layout, stage: int, frozen: tuple[str, ...] = ()
) -> dict[str, list[ParamSpec]]:
    """unit name -> parameters of the units that pipeline stage `stage` holds, in the order of the forward pass.

    A tied token table is held by the first and by the last stage; with one stage they are the same.

    Args:
        frozen: patterns of the names of parameters that do not train.
    """
    return {unit: [_frozen(s, frozen) for s in specs] for unit, specs in _stage_units(model, layout, stage).items()}


def _frozen(spec: ParamSpec, patterns: tuple[str, ...]) -> ParamSpec:
    if any(fnmatch.fnmatchcase(spec.name, pattern) for pattern in patterns):
        return dataclasses.replace(spec, trains=False, decays=False)
    return spec


def _stage_units(model: ModelConfig, layout: Layout, stage: int) -> dict[str, list[ParamSpec]]:
    h, v, std = model.hidden_size, model.vocab_size, model.init_method_std
    assert v > 0, "the vocabulary size is not resolved yet"
    first, last = stage == 0, stage == layout.pp - 1
    table = ParamSpec(f"{TOKEN_EMBEDDING}.weight", (v, h), 0, True, std, pads=True)
    units: dict[str, list[ParamSpec]] = {}
    if first or (last and not model.untie_embeddings):
        units[TOKEN_EMBEDDING] = [table]
    if first:
        units[POSITION_EMBEDDING] = [ParamSpec(f"{POSITION_EMBEDDING}.weight", (model.seq_length, h), None, True, std)]
    for layer in layout.layers(model.num_layers, stage):
        units[f"blocks.{layer}"] = block_specs(model, layer)
    if last:
        units[HEAD] = [
            ParamSpec(f"{HEAD}.norm.weight", (h,), None, False, mean=1.0),
            ParamSpec(f"{HEAD}.norm.bias", (h,), None, False),
        ]
        if model.untie_embeddings:
            units[HEAD].append(ParamSpec(f"{HEAD}.output.weight", (v, h), 0, True, std, pads=True))
    return units


def unit_layout(specs: list[ParamSpec], tp_size: int, shards: int) -> FlatLayout:
    """The flat buffer of a unit, laid out for `shards` data-parallel ranks. The same on every tensor-parallel rank."""
    return flat_layout(
        [FlatParam(s.name, s.local(tp_size, 0).stored_numel, s.decays, s.tp_dim is not None) for s in specs],
        shards,
    )


def num_parameters(model: ModelConfig) -> int:
    """Count the elements of the whole model, each parameter once, padding excluded."""
    units = stage_units(model, Layout(), 0)
    return sum(math.prod(s.shape) for specs in units.values() for s in specs)
