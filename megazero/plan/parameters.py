"""Parameters of the model as plain values: global name, global shape, sharded dim, decay, initial values, unit. Pure.

The layers declare them (`model.weight`); the initial weights, the checkpoints and `estimate` read them here.

A *unit* is what is gathered, reduced and updated together: a block, the token table, the position table, the head.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import importlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megazero.config.schema import ActivationConfig, ModelConfig
from megazero.plan.flat_layout import FlatLayout, FlatParam, flat_layout, round_up
from megazero.plan.schedules import Costs
from megazero.plan.split import NonBlockCosts
from megazero.plan.topology import Layout

TOKEN_EMBEDDING, POSITION_EMBEDDING, HEAD = "token_embedding", "position_embedding", "head"
FIRST_BLOCK = "blocks.0"
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
    sharded: tuple[tuple[int, str], ...]  # (dim, the axis that shards it); over all other axes it is replicated
    decays: bool
    std: float = 0.0  # of the initial normal distribution
    mean: float = 0.0
    pads: bool = False  # rows are padded: the vocabulary
    summed: frozenset[str] = frozenset()  # axes besides the data-parallel ones over which its gradient is a sum
    trains: bool = True  # False: frozen; it has no gradient and does not decay

    @property
    def axes(self) -> frozenset[str]:
        """Axes that shard it."""
        return frozenset(axis for _, axis in self.sharded)

    def local(self, ranks: Mapping[str, int], sizes: Mapping[str, int]) -> LocalBlock:
        """Return the block of a rank. Without padding, the sizes divide: `config` has checked that.

        Args:
            ranks, sizes: axis -> the rank along it, and its size; at least of the axes that shard the parameter.
        """
        offset, shape, stored = [0] * len(self.shape), list(self.shape), list(self.shape)
        for dim, axis in self.sharded:
            whole = self.shape[dim]
            each = -(-whole // sizes[axis])
            if self.pads:
                each = round_up(each, VOCABULARY_ALIGN)
            assert self.pads or each * sizes[axis] == whole, (self.name, self.shape, axis, sizes)
            offset[dim] = min(whole, ranks[axis] * each)
            shape[dim] = min(whole, offset[dim] + each) - offset[dim]
            stored[dim] = each
        return LocalBlock(tuple(offset), tuple(shape), tuple(stored))


@functools.lru_cache(maxsize=64)
def declared(model: ModelConfig, tp: int) -> dict[str, tuple[ParamSpec, ...]]:
    """Unit name -> the weights that its layer declares, in the order of the forward pass; of the blocks, the first.

    They are plain values. The layers that declare them need torch, and are imported here when they are first asked.
    """
    found: dict[str, tuple[ParamSpec, ...]] = importlib.import_module("megazero.model.stage").declare(model, tp)
    return found


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
    known, first, last = declared(model, layout.tp), stage == 0, stage == layout.last_pp
    at_end = (HEAD,) if model.untie_embeddings else (HEAD, TOKEN_EMBEDDING)
    units: dict[str, list[ParamSpec]] = {}
    for name, specs in known.items():
        if name == FIRST_BLOCK:
            for number in layout.layers(model.num_layers, stage):
                units[f"blocks.{number}"] = [
                    dataclasses.replace(s, name=s.name.replace(FIRST_BLOCK, f"blocks.{number}", 1)) for s in specs
                ]
        elif (last and name in at_end) or (first and name != HEAD):
            units[name] = list(specs)
    return units


def unit_layout(specs: Iterable[ParamSpec], sizes: Mapping[str, int], shards: int) -> FlatLayout:
    """The flat buffer of a unit, laid out for `shards` data-parallel ranks. The same on all ranks of other axes.

    Args:
        sizes: axis -> its size; at least of the axes that shard a parameter.
    """
    first = dict.fromkeys(sizes, 0)
    return flat_layout(
        [FlatParam(s.name, s.local(first, sizes).stored_numel, s.decays, s.axes, s.summed) for s in specs], shards
    )


def num_parameters(model: ModelConfig) -> int:
    """Count the elements of the whole model, each parameter once, padding excluded."""
    counts = {name: sum(math.prod(s.shape) for s in specs) for name, specs in declared(model, 1).items()}
    return sum(count * (model.num_layers if name == FIRST_BLOCK else 1) for name, count in counts.items())


def _block_flops(model: ModelConfig) -> tuple[int, int]:
    """Return FLOPs per token of a block's forward: of its matrices, 2 per element, and of its attention, 4 s h."""
    matrices = 2 * sum(math.prod(spec.shape) for spec in declared(model, 1)[FIRST_BLOCK] if spec.decays)
    return matrices, 4 * model.seq_length * model.hidden_size


def non_block_costs(model: ModelConfig, activations: ActivationConfig) -> NonBlockCosts:
    """Cost of the embedding (2 h FLOPs per token) and of the head (2 v h), in blocks.

    A backward takes twice as much as a forward. A block that is recomputed takes one more forward; embedding and head
    are not recomputed.
    """
    h = model.hidden_size
    cost = sum(_block_flops(model)) * (4 if activations.recompute == "full" else 3) / 3
    return NonBlockCosts(2 * h / cost, 2 * model.vocab_size * h / cost)


def pass_costs(model: ModelConfig, activations: ActivationConfig) -> Costs:
    """Cost of a block's passes, in forwards: attention's whole backward, and all recompute, are in the input gradient.

    Selective recompute computes the scores again, half of attention's products.
    """
    matrices, attention = _block_flops(model)
    again = {"none": 0.0, "selective": attention / 2, "full": float(matrices + attention)}[activations.recompute]
    forward = matrices + attention
    return Costs(1.0, (matrices + 2 * attention + again) / forward, matrices / forward)
