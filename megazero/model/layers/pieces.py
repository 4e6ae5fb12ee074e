"""Attention in pieces: queries that see the same first key, and the keys of a block that they see.

Shapes: b micro-batch, s tokens of a sample, t those of a sample on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from megazero.model.layers.dealt import DealtTokens, Ranges, num_before
from megazero.model.layers.documents import Documents

ALIGNMENT = 8  # elements of a mask's row that GPUs read together
LEAST_CHUNK = 64  # queries of a window's pieces: fewer cost more in calls than they save in masked keys

Index = tuple[slice, slice, slice]  # of [b, heads, tokens, ..]


class Piece(NamedTuple):
    """The queries [first, stop) of some samples, which see keys of [seen, stop).

    Attributes:
        row: of the first query among this rank's tokens of a sample.
        masked: by a window: the keys are those of a window before the first query, and of the queries.
    """

    samples: slice
    row: int
    first: int
    stop: int
    seen: int
    masked: bool

    @property
    def queries(self) -> Index:
        return self.samples, slice(None), slice(self.row, self.row + self.stop - self.first)

    @property
    def keys(self) -> Index:
        """The index of its keys among those of the whole samples."""
        return self.samples, slice(None), slice(self.seen, self.stop)

    def of(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Return its part of a window's mask; None if it is causal."""
        if not self.masked:
            return None
        assert mask is not None
        return mask[: self.stop - self.first, : self.stop - self.seen]


class Part(NamedTuple):
    """A piece's queries, and some keys of a block. `own`: the keys include those of the queries, which come first."""

    piece: Piece
    keys: Index
    own: bool


def parts(piece: Piece, block: tuple[Ranges, ...], own: bool, joined: bool) -> Iterator[Part]:
    """Yield the parts of a piece's attention to a block of keys.

    Args:
        block: the ranges of each sample whose keys the block has.
        own: the block has the queries' own keys.
        joined: a kernel takes own and earlier keys together; else they are two parts.
    """
    ranges = block[piece.samples.start or 0]
    seen, first = num_before(ranges, piece.seen), num_before(ranges, piece.first)

    def part(start: int, stop: int, own: bool) -> Part:
        return Part(piece, (piece.samples, slice(None), slice(start, stop)), own)

    if own:
        joined = joined or piece.masked
        yield part(seen if joined else first, first + piece.stop - piece.first, True)
    if seen < first and not (own and joined):
        yield part(seen, first, False)


def pieces_of(
    documents: Documents | None, length: int, window: int, dealt: DealtTokens | None, chunks: bool = True
) -> Iterator[Piece]:
    """Yield a piece per document, or sample, and range of this rank's tokens.

    With a window and `chunks`, the first piece ends where the window is full. Each of the others has `_chunk` queries,
    and the keys of a window before them, of which the first is always masked. Without `chunks`, the kernel knows the
    window: a piece sees the keys that any of its queries sees.
    """
    for samples, own, begin, end in _documents(documents, length, dealt):
        row = 0
        for run in own:
            first, stop = max(run.start, begin), min(run.stop, end)
            if first < stop:
                at = row + first - run.start
                yield from _cut(samples, at, range(first, stop), begin, window, chunks)
            row += len(run)


def _documents(
    documents: Documents | None, length: int, dealt: DealtTokens | None
) -> Iterator[tuple[slice, Ranges, int, int]]:
    """Yield documents: their samples, this rank's ranges of these, and the first and last index."""
    everything = ((range(length),),) if dealt is None else dealt.of_rank(dealt.rank)
    if documents is not None:
        for span in documents.spans:
            own = everything[span.sample if dealt is not None else 0]
            yield slice(span.sample, span.sample + 1), own, span.first, span.stop
    elif dealt is None or dealt.alike:
        yield slice(None), everything[0], 0, length
    else:
        for sample, own in enumerate(everything):
            yield slice(sample, sample + 1), own, 0, length


def _cut(samples: slice, row: int, queries: range, begin: int, window: int, chunks: bool) -> Iterator[Piece]:
    """Yield the pieces of queries of the document that begins at `begin`."""
    first, stop = queries.start, queries.stop
    if window and not chunks:
        begin = max(begin, first - window + 1)
        window = 0
    full = min(max(begin + window, first), stop) if window else stop
    if first < full:
        yield Piece(samples, row, first, full, begin, False)
    for at in range(full, stop, chunk(window)):
        yield Piece(samples, row + at - first, at, min(at + chunk(window), stop), at - window, True)


def chunk(window: int) -> int:
    return max(LEAST_CHUNK, window // 4)


def window_mask(like: torch.Tensor, window: int) -> torch.Tensor | None:
    """Return the mask of pieces that are not causal, [chunk, window + chunk]: 0 at keys that a query sees, or -inf.

    Rows are a multiple of ALIGNMENT long, because kernels of GPUs would copy others.
    """
    if not window:
        return None
    columns = -(-(window + chunk(window)) // ALIGNMENT) * ALIGNMENT
    mask = like.new_full((chunk(window), columns), -torch.inf)
    return mask.triu_(window + 1) + mask.new_full(mask.shape, -torch.inf).tril_()
