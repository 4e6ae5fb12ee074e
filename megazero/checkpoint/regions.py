"""Regions (rectangular parts) of tensors: flat ranges as regions, and the proof that regions tile a tensor. Pure.

Under ZeRO a rank owns a flat range of a tensor; file formats and resharding use regions. A flat range of an n-d tensor
is at most 2n-1 regions. For a matrix they are the rest of a row, whole rows, and the start of a row.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Region:
    """Elements `[offset[d], offset[d] + size[d])` in every dim d; one element if there are no dims."""

    offset: Shape
    size: Shape

    @property
    def volume(self) -> int:
        """Number of elements."""
        return prod(self.size)

    def moved(self, by: Sequence[int]) -> "Region":
        """Return this region moved by `by[d]` elements in dim d."""
        return Region(tuple(o + b for o, b in zip(self.offset, by, strict=True)), self.size)


def regions(shape: Sequence[int], start: int, stop: int) -> list[Region]:
    """Return the flat range `[start, stop)` of a row-major tensor of `shape`, in elements, as regions in flat order.

    There are at most `2 * len(shape) - 1`: one for a tensor without dims, none for an empty range.
    """
    assert 0 <= start <= stop <= prod(shape), (shape, start, stop)
    if start == stop:
        return []
    if not shape:
        return [Region((), ())]
    rows, inner = shape[0], shape[1:]
    row_size = prod(inner)
    first_row, head = divmod(start, row_size)
    last_row, tail = divmod(stop, row_size)
    if first_row == last_row:  # begins and ends within one row
        return _in_row(first_row, regions(inner, head, tail))
    pieces = []
    if head:
        pieces += _in_row(first_row, regions(inner, head, row_size))
        first_row += 1
    if first_row < last_row:
        pieces.append(Region((first_row,) + (0,) * len(inner), (last_row - first_row, *inner)))
    if tail:
        assert last_row < rows, (shape, start, stop)
        pieces += _in_row(last_row, regions(inner, 0, tail))
    return pieces


def _in_row(row: int, pieces: Iterable[Region]) -> list[Region]:
    """Return regions of row `row`, given without dim 0, as regions of the tensor."""
    return [Region((row, *piece.offset), (1, *piece.size)) for piece in pieces]


def split(region: Region, limit: int) -> list[Region]:
    """Cut a region into pieces of at most `limit` elements, in the row-major order of its elements.

    Only leading dims are cut. So a piece of a contiguous region is contiguous.
    """
    assert limit > 0, limit
    if region.volume <= limit:
        return [region]
    (first, *offset), (rows, *size) = region.offset, region.size
    rows_at_once = limit // prod(size)
    if rows_at_once == 0:  # not even one row fits: cut within each row
        inner = split(Region(tuple(offset), tuple(size)), limit)
        return [piece for row in range(first, first + rows) for piece in _in_row(row, inner)]
    return [
        Region((row, *offset), (min(rows_at_once, first + rows - row), *size))
        for row in range(first, first + rows, rows_at_once)
    ]


def intersection(a: Region, b: Region) -> Region | None:
    """Return the elements in both regions, or None."""
    offset, size = [], []
    for first, count, other, others in zip(a.offset, a.size, b.offset, b.size, strict=True):
        start, stop = max(first, other), min(first + count, other + others)
        if start >= stop:
            return None
        offset.append(start)
        size.append(stop - start)
    return Region(tuple(offset), tuple(size))


def coverage_fault(global_shape: Sequence[int], pieces: Iterable[Region]) -> str | None:
    """Return None if `pieces` hold every element of a tensor of `global_shape` exactly once.

    Else return the first fault, such as "elements [0:4, 8:16] are missing". The sweep cuts dim 0 at the edges of all
    pieces; between two cuts, the active pieces must cover the remaining dims exactly once. The time grows with cuts x
    active pieces, not with elements: thousands of pieces take tens of milliseconds.
    """
    shape = tuple(global_shape)
    solid = [piece for piece in pieces if piece.volume > 0]
    for piece in solid:
        if not _is_within(piece, shape):
            return f"the piece {_brackets(_intervals(piece))} is outside the shape {shape}"
    return _sweep(shape, solid, ())


Interval = tuple[int, int]


def _sweep(shape: Shape, pieces: Sequence[Region], cut: tuple[Interval, ...]) -> str | None:
    """`coverage_fault` within `cut`, an interval per dim swept so far, which every piece crosses."""
    dim = len(cut)
    if not pieces and prod(shape) > 0:
        rest = tuple((0, size) for size in shape[dim:])
        return f"elements {_brackets(cut + rest)} are missing"
    if dim == len(shape):
        return None if len(pieces) <= 1 else f"elements {_brackets(cut)} are given {len(pieces)} times"
    waiting = sorted(pieces, key=lambda piece: piece.offset[dim], reverse=True)
    edges = sorted({0, shape[dim], *(edge for piece in pieces for edge in _intervals(piece)[dim])})
    active: list[Region] = []
    for start, stop in pairwise(edges):
        active = [piece for piece in active if _intervals(piece)[dim][1] > start]
        while waiting and waiting[-1].offset[dim] == start:
            active.append(waiting.pop())
        fault = _sweep(shape, active, (*cut, (start, stop)))
        if fault:
            return fault
    return None


def _intervals(piece: Region) -> tuple[Interval, ...]:
    return tuple((offset, offset + size) for offset, size in zip(piece.offset, piece.size, strict=True))


def _is_within(piece: Region, shape: Shape) -> bool:
    return len(piece.offset) == len(shape) and all(
        0 <= start and stop <= size for (start, stop), size in zip(_intervals(piece), shape, strict=True)
    )


def _brackets(intervals: Iterable[Interval]) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in intervals) + "]"
