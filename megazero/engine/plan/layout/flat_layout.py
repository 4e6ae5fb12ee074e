"""Arithmetic of a unit's flat buffer. Pure: integers only.

    decayed: sharded, replicated, partial | undecayed: partial, replicated, sharded | padding

A *section* holds the parameters with the same weight decay, sharding axes and gradient-sum axes. Each rank computes
only a part of the gradient of a *partial* parameter, which is summed over tp. With sequence parallelism, this is true
of all replicated parameters. The order gives one range that decays (so at most two optimizer slices for any owned
range), one that is replicated (counted once in the gradient norm) and one that is partial.

Every parameter starts at a multiple of ALIGN elements, so that kernels read aligned memory. Gaps are kept zero. The
total is a multiple of ALIGN x the ranks that share the buffer.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megazero.engine.options.optimizers import Optimizer, UpdateRule, WeightKind

ALIGN = 64  # elements


class Range(NamedTuple):
    """[start, stop) in elements."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def within(self, outer: Range) -> Range:
        """The part of this range inside `outer`, counted from the start of `outer`; possibly empty."""
        start, stop = max(self.start, outer.start), min(self.stop, outer.stop)
        return Range(start - outer.start, max(start, stop) - outer.start)

    def slice(self) -> slice:
        return slice(self.start, self.stop)


class Matrices(NamedTuple):
    """Matrices of equal shape that are updated as whole ones.

    Attributes:
        number: how many there are, in a piece.
        rows, columns: of each, whole.
        axis: the axis whose ranks have a part of each; empty: they are not divided.
        by_rows: whether a part has some rows, or some columns.
    """

    number: int
    rows: int
    columns: int
    axis: str = ""
    by_rows: bool = True

    @property
    def sides(self) -> tuple[int, int]:
        """The shorter side, which is that of the Gram matrices, and the longer one."""
        return min(self.rows, self.columns), max(self.rows, self.columns)

    @property
    def sums_grams(self) -> bool:
        """True if ranks that have parts of a matrix sum the Gram matrices of these parts: the longer side is divided.

        Otherwise they gather the matrix, and each computes all of it.
        """
        return bool(self.axis) and self.sides[1] == (self.rows if self.by_rows else self.columns)

    @property
    def cost(self) -> int:
        """A cost that is in proportion to the products of a Newton-Schulz iteration."""
        short, long = self.sides
        return self.number * short * short * long

    def working(self, ranks: int) -> int:
        """Return the elements of the buffers of an update on one of `ranks` ranks of the axis.

        These are the matrix, its normalized copy and the next one, two Gram matrices, and a part that is gathered.
        """
        side, other = self.sides
        part = side * other // ranks
        if self.sums_grams:
            return 3 * part + 2 * side * side
        return 3 * side * other + 2 * side * side + (part if ranks > 1 else 0)


class FlatParam(NamedTuple):
    """The properties of a parameter that its place in the buffer depends on."""

    name: str
    numel: int  # elements of the local block, vocabulary padding included
    decays: bool  # weight decay applies
    sharded: frozenset[str] = frozenset()  # axes that shard it; it is replicated over all others
    summed: frozenset[str] = frozenset()  # axes that replicate it and sum its gradient
    kind: WeightKind = WeightKind()
    pieces: int = 0  # equal parts, between which an optimizer of whole matrices may cut it
    matrices: Matrices | None = None  # matrices of each piece, if it trains

    @property
    def section(self) -> tuple[bool, list[str], list[str]]:
        """The key that sections are sorted by: sharded ones first, partial ones last."""
        return not self.sharded, sorted(self.sharded), sorted(self.summed)


class FlatPiece(NamedTuple):
    """A parameter, or a part of it that one rank must own if its optimizer updates whole matrices."""

    start: int
    matrices: Matrices | None


class Section(NamedTuple):
    """Neighbours in a flat buffer with equal sets of axes, gaps included."""

    range: Range
    sharded: frozenset[str]
    summed: frozenset[str]


@dataclass(frozen=True)
class FlatLayout:
    """Offsets of a unit's parameters in its flat buffer."""

    windows: dict[str, Range]
    gaps: list[Range]
    sections: list[Section]
    decayed: Range
    kinds: list[tuple[WeightKind, Range]]  # ranges by kind of weight, gaps included; they tile the buffer
    pieces: list[FlatPiece]
    numel: int

    @property
    def has_matrices(self) -> bool:
        return any(kind.is_matrix for kind, _ in self.kinds)

    def by_rule(self, owned: Range, optimizer: Optimizer) -> list[tuple[UpdateRule, Range]]:
        """Divide a range into parts with the same rule, counted from its start. Every rule has one, possibly empty."""
        found: list[tuple[UpdateRule, Range]] = []
        for kind, part in self.kinds:
            rule, mine = optimizer.rule(kind), part.within(owned)
            if mine.numel:
                joins = bool(found) and found[-1][0] == rule
                found.append((rule, Range(found.pop()[1].start if joins else mine.start, mine.stop)))
        return found + [(rule, Range(0, 0)) for rule in optimizer.rules if rule not in dict(found)]

    def cost(self, owned: Range) -> int:
        """Return the cost of updating the matrices in a range, which begins and ends between pieces."""
        first, stop = (bisect.bisect_left(self.pieces, at, key=lambda piece: piece.start) for at in owned)
        return self._costs[stop] - self._costs[first]

    @functools.cached_property
    def _costs(self) -> list[int]:
        """The cost of all pieces before each, and of all."""
        return [0, *itertools.accumulate(piece.matrices.cost if piece.matrices else 0 for piece in self.pieces)]

    def matrices_in(self, owned: Range) -> list[Matrices]:
        """Return the matrices of each piece in a range."""
        return [piece.matrices for piece in self.pieces if piece.matrices and owned.start <= piece.start < owned.stop]

    def replicated(self, axis: str) -> list[Range]:
        """Return the ranges of the parameters that are replicated over `axis`."""
        return _joined(section.range for section in self.sections if axis not in section.sharded)

    def sharded(self, axis: str) -> list[Range]:
        """Return the ranges that `axis` shards. They may include padding, which is zero."""
        found = []
        for at, stop in (self.decayed, Range(self.decayed.stop, self.numel)):
            for shared in self.replicated(axis):
                found.append(Range(at, min(shared.start, stop)))
                at = max(at, min(shared.stop, stop))
            found.append(Range(at, stop))
        return [r for r in found if r.start < r.stop]

    def summed(self, axis: str, sequence_parallel: bool) -> list[Range]:
        """Return the ranges whose gradient is summed over `axis`; with sequence parallelism, all replicated ones."""
        if sequence_parallel:
            return self.replicated(axis)
        return _joined(section.range for section in self.sections if axis in section.summed)


def overlap(window: Range, numel: int, owned: Range) -> tuple[int, int, Range]:
    """Return the part of a parameter of `numel` elements in `owned`, possibly empty, without its window's padding.

    Returns:
        its start and its stop in the parameter's local block, flat; the same part, counted from the start of `owned`.
    """
    true = Range(window.start, window.start + numel)
    mine = true.within(owned)
    first = mine.start + owned.start - true.start if mine.numel else 0
    return first, first + mine.numel, mine


def equal_ranges(numel: int, size: int) -> tuple[Range, ...]:
    """Cut a buffer into `size` equal ranges, possibly inside a weight."""
    assert numel % size == 0, (numel, size)
    each = numel // size
    return tuple(Range(rank * each, (rank + 1) * each) for rank in range(size))


def whole_ranges(flat: FlatLayout, size: int) -> tuple[Range, ...]:
    """Cut a buffer into `size` ranges between pieces, as near to equal ones as possible.

    A range exceeds an equal one by at most one piece.
    """
    starts = sorted([*(piece.start for piece in flat.pieces), flat.numel])
    edges = [min(starts, key=lambda at: abs(at * size - k * flat.numel)) for k in range(1, size)]
    return tuple(Range(*each) for each in itertools.pairwise([0, *edges, flat.numel]))


def deal_matrices(flats: Mapping[str, FlatLayout], size: int) -> dict[str, tuple[Range, ...]]:
    """Cut each buffer by `whole_ranges`, and give its costly ranges to the ranks with the least cost so far.

    Returns:
        name -> the range of each rank. The ranges of a buffer are in any order.
    """
    held, found = [(0, 0)] * size, {}  # rank -> (cost, elements)
    for name, flat in flats.items():
        ranges = sorted(whole_ranges(flat, size), key=lambda r: (flat.cost(r), r.numel), reverse=True)
        mine = dict(zip(sorted(range(size), key=lambda rank: held[rank]), ranges, strict=True))
        held = [(cost + flat.cost(mine[rank]), n + mine[rank].numel) for rank, (cost, n) in enumerate(held)]
        found[name] = tuple(mine[rank] for rank in range(size))
    return found


def _joined(ranges: Iterable[Range]) -> list[Range]:
    found: list[Range] = []
    for r in ranges:
        touches = found and found[-1].stop == r.start
        found.append(Range(found.pop().start if touches else r.start, r.stop))
    return found


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def flat_layout(params: Iterable[FlatParam], size: int) -> FlatLayout:
    """Lay parameters out for `size` ranks that share the buffer."""
    params = list(params)
    windows: dict[str, Range] = {}
    kinds: list[tuple[WeightKind, Range]] = []
    pieces: list[FlatPiece] = []
    gaps: list[Range] = []
    sections: list[Section] = []
    at = decayed = 0
    for decays in (True, False):
        half = sorted(
            (p for p in params if p.decays == decays),
            key=lambda p: (p.section, not p.kind.is_matrix),
            reverse=not decays,
        )
        for (_, sharded, summed), equal in itertools.groupby(half, key=lambda p: p.section):
            start = at
            for p in equal:
                windows[p.name] = Range(at, at + p.numel)
                gaps.append(Range(at + p.numel, round_up(at + p.numel, ALIGN)))
                pieces += _pieces(p, at)
                at = gaps[-1].stop
                kinds.append((p.kind, Range(windows[p.name].start, at)))
            sections.append(Section(Range(start, at), frozenset(sharded), frozenset(summed)))
        decayed = at if decays else decayed
    numel = round_up(at, ALIGN * size)
    gaps.append(Range(at, numel))
    kinds.append((WeightKind(), gaps[-1]))
    return FlatLayout(
        windows=windows,
        gaps=[gap for gap in gaps if gap.numel],
        sections=sections,
        decayed=Range(0, decayed),
        kinds=kinds,
        pieces=pieces,
        numel=numel,
    )


def _pieces(p: FlatParam, at: int) -> list[FlatPiece]:
    """Return the pieces of a parameter at `at`. Pieces of an unaligned size are one."""
    if p.matrices is None:
        return [FlatPiece(at, None)]
    each = p.numel // p.pieces
    if each % ALIGN or not each:
        return [FlatPiece(at, p.matrices._replace(number=p.pieces * p.matrices.number))]
    return [FlatPiece(start, p.matrices) for start in range(at, at + p.numel, each)]


def partition_numel(numel: int, size: int) -> int:
    """Return numel / size, rounded up: the elements that each of `size` ranks stores. The last ranks pad theirs."""
    return -(-numel // size)
