"""Arithmetic of a unit's flat buffer. Pure: integers only.

    decayed: sharded over tp, replicated, partial | undecayed: partial, replicated, sharded over tp | padding

Partial is replicated too, but each tensor-parallel rank has a summand of the gradient. So what decays is one range (at
most two optimizer slices for any owned range), what is replicated is one (counted once in the gradient norm), and what
is partial is one (summed over tp). Every parameter starts at a multiple of ALIGN elements, which keeps kernels
aligned; gaps are kept zero; the total is a multiple of ALIGN x the ranks that share the buffer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

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


class FlatParam(NamedTuple):
    """A parameter as the arithmetic sees it."""

    name: str
    numel: int  # of the local block, vocabulary padding included
    decays: bool  # weight decay applies
    sharded: bool  # over tp, else replicated
    partial: bool = False  # replicated, and the gradient is a sum over tp

    @property
    def kind(self) -> str:
        return "sharded" if self.sharded else "partial" if self.partial else "replicated"


@dataclass(frozen=True)
class FlatLayout:
    """Offsets of a unit's parameters in its flat buffer."""

    windows: dict[str, Range]
    gaps: list[Range]
    decayed: Range
    replicated: Range
    partial: Range  # of the replicated
    numel: int

    def summed_over_tp(self, sequence_parallel: bool) -> Range:
        """The range whose gradient each tensor-parallel rank has a summand of; of everything, its own tokens'."""
        return self.replicated if sequence_parallel else self.partial

    def owned(self, rank: int, size: int) -> Range:
        """The range that rank `rank` of `size` owns, where the buffer is sharded."""
        assert self.numel % size == 0, (self.numel, size)
        each = self.numel // size
        return Range(rank * each, (rank + 1) * each)


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def flat_layout(params: Iterable[FlatParam], size: int) -> FlatLayout:
    """Lay parameters out for `size` ranks that share the buffer."""
    params = list(params)
    windows: dict[str, Range] = {}
    gaps: list[Range] = []
    ends: list[int] = []
    at = 0
    orders = [(True, "sharded"), (True, "replicated"), (True, "partial")]
    orders += [(False, kind) for _, kind in reversed(orders)]
    for order in orders:
        for p in params:
            if (p.decays, p.kind) != order:
                continue
            windows[p.name] = Range(at, at + p.numel)
            gaps.append(Range(at + p.numel, round_up(at + p.numel, ALIGN)))
            at = round_up(at + p.numel, ALIGN)
        ends.append(at)
    numel = round_up(at, ALIGN * size)
    gaps.append(Range(at, numel))
    return FlatLayout(
        windows,
        [gap for gap in gaps if gap.numel],
        decayed=Range(0, ends[2]),
        replicated=Range(ends[0], ends[4]),
        partial=Range(ends[1], ends[3]),
        numel=numel,
    )


def partition_numel(numel: int, size: int) -> int:
    """Elements that each of `size` ranks keeps of `numel`, rounded up: the last ones keep less, and gather as much."""
    return -(-numel // size)
