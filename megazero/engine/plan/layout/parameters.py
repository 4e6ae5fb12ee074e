"""Parameters of the model as plain values: global name, global shape, sharded dim, decay, initial values, unit. Pure.

Layers declare them (`engine.model.layers.weight`). Initial values, checkpoints and `estimate` read them.

A *unit* is gathered, reduced and updated as one buffer: a block without its experts, the experts of a block, the token
table, the position table or the head.
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megazero.engine.options.optimizers import BLOCK, WeightKind
from megazero.engine.plan.layout.flat_layout import FlatLayout, FlatParam, Matrices, flat_layout, round_up

EXPERTS = ".experts"  # end of the name of a unit of experts; it begins with their layer's
VOCABULARY_ALIGN = 64  # rows of a rank's part of the token table: keeps the logits' matrix product aligned


@dataclass(frozen=True)
class LocalBlock:
    """The part of a parameter that one tensor-parallel rank holds."""

    offset: tuple[int, ...]  # in the global tensor
    shape: tuple[int, ...]  # without padding rows: the part that is initialised, saved and loaded
    stored: tuple[int, ...]  # in memory, with the vocabulary's padding rows at the end

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
    shape: tuple[int, ...]  # global shape, padding excluded
    sharded: tuple[tuple[int, str], ...]  # (dim, the axis that shards it); over all other axes it is replicated
    decays: bool
    std: float = 0.0  # standard deviation of the initial values
    mean: float = 0.0
    pads: bool = False  # rows are padded: the vocabulary
    summed: frozenset[str] = frozenset()  # axes that sum its gradient, besides the data-parallel ones
    trains: bool = True  # False: frozen; it has no gradient and does not decay
    per_token: tuple[int, int] = (1, 1)  # the share of it that a token is multiplied with: (its experts, all experts)
    matrices: tuple[int, ...] | None = None  # dims that number matrices of their own; None: no matrix inside a block

    @property
    def active(self) -> int:
        """Elements that a token is multiplied with."""
        mine, experts = self.per_token
        return math.prod(self.shape) * mine // experts

    @property
    def blocked(self) -> bool:
        """Rows of the global tensor are whole blocks of small states. It is the same in every layout."""
        return len(self.shape) > 1 and self.shape[-1] % BLOCK == 0

    @property
    def kind(self) -> WeightKind:
        """The properties that choose its update rule."""
        return WeightKind(self.matrices is not None, self.blocked)

    @property
    def leading(self) -> int:
        """The number of leading dims that number matrices. So the equal parts along these dims are whole matrices."""
        return len(list(itertools.takewhile(lambda dim: dim in (self.matrices or ()), range(len(self.shape)))))

    def flat(self, block: LocalBlock) -> FlatParam:
        """Return the properties that its place in a flat buffer depends on."""
        param = FlatParam(
            name=self.name,
            numel=block.stored_numel,
            decays=self.decays,
            sharded=self.axes,
            summed=self.summed,
            kind=self.kind,
        )
        if self.matrices is None:
            return param
        numbers, last = self.matrices, len(self.shape) - 1
        pieces, count = math.prod(block.stored[: self.leading]), math.prod(block.stored[dim] for dim in numbers)
        rows = math.prod(size for dim, size in enumerate(self.shape[:-1]) if dim not in numbers)
        [divided] = [each for each in self.sharded if each[0] not in numbers] or [(0, "")]
        matrices = Matrices(
            number=count // pieces, rows=rows, columns=self.shape[-1], axis=divided[1], by_rows=divided[0] != last
        )
        return param._replace(pieces=pieces, matrices=matrices if self.trains else None)

    @property
    def axes(self) -> frozenset[str]:
        """Axes that shard it."""
        return frozenset(axis for _, axis in self.sharded)

    def local(self, ranks: Mapping[str, int], sizes: Mapping[str, int]) -> LocalBlock:
        """Return the block of a rank. `config` has checked that sizes without padding divide evenly.

        Args:
            ranks, sizes: axis -> the rank along it, and its size; at least for the axes that shard the parameter.
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


def unit_of(layer: str, spec: ParamSpec) -> str:
    """Return the name of the unit of a parameter: experts, which are on other ranks, have a unit of their own."""
    return layer + EXPERTS if "ep" in spec.axes else layer


def unit_layout(specs: Iterable[ParamSpec], sizes: Mapping[str, int], shards: int) -> FlatLayout:
    """Return the flat buffer of a unit for `shards` data-parallel ranks. It is the same on all ranks of other axes.

    Args:
        sizes: axis -> its size; at least for the axes that shard a parameter.
    """
    first = dict.fromkeys(sizes, 0)
    return flat_layout([spec.flat(spec.local(first, sizes)) for spec in specs], shards)
