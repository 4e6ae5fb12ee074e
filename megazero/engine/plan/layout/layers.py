"""Layers of a model as plain values: their kinds, weights and uses, and their places in the pipeline. Pure.

The model declares its layers (`engine.model.stage.declare`); callers above `plan` pass the declarations in.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from megazero.engine.options.model_options import ModelOptions
from megazero.engine.options.schema import ActivationConfig
from megazero.engine.plan.layout.parameters import ParamSpec, unit_of
from megazero.engine.plan.layout.topology import Layout
from megazero.engine.plan.schedule.schedules import Costs

# Numbers that a router sums besides its experts' loads: entropy, dropped choices, two balance losses
ROUTER_SUMS = 4


class Use(Enum):
    """Times at which a layer needs its weights, and computes their gradients."""

    LOOKUP = auto()  # embeddings: backward needs no weights
    LAYER = auto()  # gathered for forward, and again for backward
    HEAD = auto()  # its forward computes all of its gradients, and its backward needs no weights


class Declare(Protocol):
    """Return the layers of a model, declared for `tp` tensor-parallel ranks."""

    def __call__(self, model: ModelOptions, tp: int = 1) -> Layers: ...


class End(Enum):
    """The end of the model that a layer is at. The layers between the ends, the blocks, are split over the stages."""

    FIRST = "first"
    LAST = "last"


@dataclass(frozen=True)
class LayerKind:
    """Layers that differ only in their number. They are declared, traced and priced once.

    Attributes:
        name: of the first layer of this kind.
        end: of the model; None: a block.
        params: weights of the first layer.
        reads: units of other layers that it also reads, such as a tied token table.
        score_flops: FLOPs per token of the forward's products of activations with each other: attention.
    """

    name: str
    use: Use
    end: End | None
    params: tuple[ParamSpec, ...]
    reads: tuple[str, ...] = ()
    score_flops: int = 0

    @property
    def matrix_flops(self) -> int:
        """FLOPs per token of the forward's products with its own weights: 2 per element that the token meets."""
        return 2 * sum(spec.active for spec in self.params if spec.decays)

    @functools.cached_property
    def suffixes(self) -> tuple[str, ...]:
        """The ends of the names of its units, after the layer's name: "" and perhaps that of experts."""
        return tuple(dict.fromkeys(["", *(unit_of("", spec) for spec in self.params)]))

    def units_of(self, layer: str, frozen: tuple[str, ...] = ()) -> dict[str, list[ParamSpec]]:
        """Return unit -> its weights, of layer `layer` of this kind."""
        params = self.params_of(layer, frozen)
        if len(self.suffixes) == 1:
            return {layer: params}
        return {layer + end: [spec for spec in params if unit_of(layer, spec) == layer + end] for end in self.suffixes}

    def params_of(self, layer: str, frozen: tuple[str, ...] = ()) -> list[ParamSpec]:
        """Return the weights of layer `layer` of this kind; names that match a pattern of `frozen` do not train."""
        named = [dataclasses.replace(s, name=layer + s.name.removeprefix(self.name)) for s in self.params]
        return [
            dataclasses.replace(s, trains=False, decays=False)
            if any(fnmatch.fnmatchcase(s.name, pattern) for pattern in frozen)
            else s
            for s in named
        ]


@dataclass(frozen=True, eq=False)
class Layers:
    """All layers of a model, as declared on `tp` tensor-parallel ranks.

    Attributes:
        kinds: layer -> its kind, in the order of the forward pass.
    """

    tp: int
    kinds: dict[str, LayerKind]

    @functools.cached_property
    def blocks(self) -> tuple[str, ...]:
        return tuple(name for name, kind in self.kinds.items() if kind.end is None)

    @functools.cached_property
    def block_flops(self) -> dict[str, tuple[int, int]]:
        """Block -> FLOPs per token of its forward: of its matrices, and of its attention."""
        kinds = {kind.name: kind for kind in self.kinds.values()}
        flops = {name: (kind.matrix_flops, kind.score_flops) for name, kind in kinds.items()}
        return {name: flops[self.kinds[name].name] for name in self.blocks}

    @functools.cached_property
    def tied(self) -> str | None:
        """The unit that the layers at both ends of the model read: a tied token table."""
        found = {unit for kind in self.kinds.values() for unit in kind.reads}
        assert len(found) <= 1, found
        return next(iter(found), None)

    def params(self) -> Iterator[ParamSpec]:
        """Yield the weights of the whole model, each once."""
        for name, kind in self.kinds.items():
            yield from kind.params_of(name)

    def chunk(self, layout: Layout, pp: int, chunk: int) -> list[str]:
        """Return the layers of one chunk of pipeline rank `pp`, in the order of the forward pass."""
        stage, last = layout.stages(pp)[chunk], len(layout.placement) - 1
        blocks = [self.blocks[number] for number in layout.chunk_layers(len(self.blocks), pp, chunk)]
        first = self._at(End.FIRST) if stage == 0 else []
        return [*first, *blocks, *(self._at(End.LAST) if stage == last else [])]

    def _at(self, end: End) -> list[str]:
        return [name for name, kind in self.kinds.items() if kind.end is end]

    def of_rank(self, layout: Layout, pp: int) -> list[str]:
        return [name for chunk in range(layout.chunks) for name in self.chunk(layout, pp, chunk)]

    def held(self, layout: Layout, pp: int) -> list[str]:
        """Return the layers whose units pipeline rank `pp` holds: its own, after others that they read.

        The first and the last stage both hold a tied token table.
        """
        own = self.of_rank(layout, pp)
        return [*(unit for name in own for unit in self.kinds[name].reads if unit not in own), *own]


@functools.lru_cache(maxsize=4)
def stage_units(layers: Layers, layout: Layout, pp: int, frozen: tuple[str, ...] = ()) -> dict[str, list[ParamSpec]]:
    """unit name -> parameters of the units that pipeline rank `pp` holds, in the order of the forward pass.

    Args:
        frozen: patterns of the names of parameters that do not train.
    """
    found: dict[str, list[ParamSpec]] = {}
    for name in layers.held(layout, pp):
        found |= layers.kinds[name].units_of(name, frozen)
    return found


def pass_costs(layers: Layers, activations: ActivationConfig) -> Costs:
    """Return the costs of a mean block's passes; 1 is its forward.

    The input gradient includes attention's whole backward and all recompute. Selective recompute repeats the scores,
    which are half of attention's products.
    """
    matrices, attention = (sum(each) for each in zip(*layers.block_flops.values(), strict=True))
    again = {"none": 0.0, "selective": attention / 2, "full": float(matrices + attention)}[activations.recompute]
    forward = matrices + attention
    return Costs(1.0, (matrices + 2 * attention + again) / forward, matrices / forward)
