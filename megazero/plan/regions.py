"""Flat ranges of row-major tensors as rectangles, and the proof that rectangles tile a tensor. Pure integers.

What a rank owns of a tensor under ZeRO is a range of its flat order; what a file format and a resharding plan
speak of is rectangles. A flat range of an n-d tensor is at most 2n-1 of them: for a matrix, the rest of a
row, whole rows, and the start of a row.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Rectangle:
    """The elements `[offset[d], offset[d] + size[d])` in every dim d; one element where there are no dims."""

    offset: Shape
    size: Shape

    @property
    def volume(self) -> int:
        """Number of elements."""
        return prod(self.size)

    def moved(self, by: Sequence[int]) -> "Rectangle":
        """The same rectangle, `by[d]` elements further in dim d."""
        return Rectangle(tuple(o + b for o, b in zip(self.offset, by, strict=True)), self.size)


def rectangles(shape: Sequence[int], start: int, stop: int) -> list[Rectangle]:
    """The flat range `[start, stop)` of a row-major tensor of `shape`, in elements, as rectangles.

    At most `2 * len(shape) - 1` of them (one for a tensor without dims, none for an empty range), in flat
    order: laid end to end they are the range, so the k-th begins where the volumes before it end.
    """
    assert 0 <= start <= stop <= prod(shape), (shape, start, stop)
    if start == stop:
        return []
    if not shape:
        return [Rectangle((), ())]
    rows, inner = shape[0], shape[1:]
    row_size = prod(inner)
    first_row, head = divmod(start, row_size)
    last_row, tail = divmod(stop, row_size)
    if first_row == last_row:  # begins and ends within one row
        return _in_row(first_row, rectangles(inner, head, tail))
    pieces = []
    if head:
        pieces += _in_row(first_row, rectangles(inner, head, row_size))
        first_row += 1
    if first_row < last_row:
        pieces.append(Rectangle((first_row,) + (0,) * len(inner), (last_row - first_row, *inner)))
    if tail:
        assert last_row < rows, (shape, start, stop)
        pieces += _in_row(last_row, rectangles(inner, 0, tail))
    return pieces


def _in_row(row: int, pieces: Iterable[Rectangle]) -> list[Rectangle]:
    """Rectangles of row `row`, given without dim 0, as rectangles of the tensor."""
    return [Rectangle((row, *piece.offset), (1, *piece.size)) for piece in pieces]


def split(rectangle: Rectangle, limit: int) -> list[Rectangle]:
    """Cut a rectangle into pieces of at most `limit` elements, in the row-major order of its elements.

    Only leading dims are cut, so each piece is contiguous in that order: where the rectangle's elements lie
    end to end in memory, so do those of each piece.
    """
    assert limit > 0, limit
    if rectangle.volume <= limit:
        return [rectangle]
    (first, *offset), (rows, *size) = rectangle.offset, rectangle.size
    rows_at_once = limit // prod(size)
    if rows_at_once == 0:  # not even one row fits: cut within each row
        inner = split(Rectangle(tuple(offset), tuple(size)), limit)
        return [piece for row in range(first, first + rows) for piece in _in_row(row, inner)]
    return [
        Rectangle((row, *offset), (min(rows_at_once, first + rows - row), *size))
        for row in range(first, first + rows, rows_at_once)
    ]


def coverage_fault(global_shape: Sequence[int], pieces: Iterable[Rectangle]) -> str | None:
    """None if `pieces` hold every element of a tensor of `global_shape` exactly once; else a phrase that says
    what is wrong, such as "elements [0:4, 8:16] are missing" (the first fault met).

    A sweep: dim 0 is cut wherever a piece begins or ends, and between two cuts the pieces in force must cover
    the remaining dims exactly once. So the time grows with cuts times pieces in force, not with elements:
    thousands of pieces take some tens of milliseconds.
    """
    shape = tuple(global_shape)
    solid = [piece for piece in pieces if piece.volume > 0]
    for piece in solid:
        if not _lies_within(piece, shape):
            return f"the piece {_brackets(_spans(piece))} lies outside the shape {shape}"
    return _sweep(shape, solid, ())


Span = tuple[int, int]


def _sweep(shape: Shape, pieces: Sequence[Rectangle], cut: tuple[Span, ...]) -> str | None:
    """`coverage_fault` within the slab `cut` (a span per dim swept so far); every piece given crosses it."""
    dim = len(cut)
    if not pieces and prod(shape) > 0:
        rest = tuple((0, size) for size in shape[dim:])
        return f"elements {_brackets(cut + rest)} are missing"
    if dim == len(shape):
        return None if len(pieces) <= 1 else f"elements {_brackets(cut)} are given {len(pieces)} times"
    waiting = sorted(pieces, key=lambda piece: piece.offset[dim], reverse=True)
    edges = sorted({0, shape[dim], *(edge for piece in pieces for edge in _spans(piece)[dim])})
    in_force: list[Rectangle] = []
    for start, stop in pairwise(edges):
        in_force = [piece for piece in in_force if _spans(piece)[dim][1] > start]
        while waiting and waiting[-1].offset[dim] == start:
            in_force.append(waiting.pop())
        fault = _sweep(shape, in_force, (*cut, (start, stop)))
        if fault:
            return fault
    return None


def _spans(piece: Rectangle) -> tuple[Span, ...]:
    return tuple((offset, offset + size) for offset, size in zip(piece.offset, piece.size, strict=True))


def _lies_within(piece: Rectangle, shape: Shape) -> bool:
    return len(piece.offset) == len(shape) and all(
        0 <= start and stop <= size for (start, stop), size in zip(_spans(piece), shape, strict=True)
    )


def _brackets(spans: Iterable[Span]) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in spans) + "]"
