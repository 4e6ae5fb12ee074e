"""Arithmetic of a unit's flat buffer. Pure: integers only.

    decayed, sharded over tp | decayed, replicated | undecayed, replicated | undecayed, sharded over tp | padding

So what decays is one range (at most two optimizer slices for any owned range), and what is replicated over tp is one
range (counted once in the gradient norm). Every parameter starts at a multiple of ALIGN elements, which keeps kernels
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


@dataclass(frozen=True)
class FlatLayout:
    """Offsets of a unit's parameters in its flat buffer."""

    windows: dict[str, Range]
    gaps: list[Range]
    decayed: Range
    replicated: Range
    numel: int

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
    for decays, sharded in ((True, True), (True, False), (False, False), (False, True)):
        for p in params:
            if (p.decays, p.sharded) != (decays, sharded):
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
        decayed=Range(0, ends[1]),
        replicated=Range(ends[0], ends[2]),
        numel=numel,
    )


def partition_numel(numel: int, size: int) -> int:
    """Elements that each of `size` ranks keeps of `numel`, rounded up: the last ones keep less, and gather as much."""
    return -(-numel // size)
