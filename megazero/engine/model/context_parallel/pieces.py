"""Attention in pieces: queries that see the same first key, and the keys of a block that they see.

Shapes: b micro-batch, s tokens of a sample, t those of a sample on this rank.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import torch

from megazero.engine.model.context_parallel.dealt import DealtTokens, Ranges
from megazero.engine.model.documents import Documents

ALIGNMENT = 8  # elements of a mask's row that GPUs read together
LEAST_CHUNK = 64  # queries of a window's pieces: fewer cost more in calls than they save in masked keys

EVERY = slice(None)
Index = tuple[slice, slice, slice]  # indexes [b, heads, tokens, ..]


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
        return self.samples, EVERY, slice(self.row, self.row + self.stop - self.first)

    @property
    def keys(self) -> Index:
        """The index of its keys among those of the whole samples."""
        return self.samples, EVERY, slice(self.seen, self.stop)

    def of(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Return its part of a window's mask; None if it is causal."""
        if not self.masked:
            return None
        assert mask is not None
        return mask[: self.stop - self.first, : self.stop - self.seen]


class BlockRows(NamedTuple):
    """The rows of a block of keys, of one sample: those of each range follow those of the one before."""

    ranges: Ranges
    starts: list[int]
    rows: list[int]  # row of each range's first token

    @classmethod
    def of(cls, ranges: Ranges) -> BlockRows:
        return cls(ranges, [run.start for run in ranges], [0, *accumulate(map(len, ranges))])

    def before(self, index: int) -> int:
        """Return the number of tokens before `index`, which is the row of `index` if the block has it."""
        at = bisect_right(self.starts, index) - 1
        return self.rows[at] + min(index - self.starts[at], len(self.ranges[at])) if at >= 0 else 0


class Part(NamedTuple):
    """A piece's queries, and some keys of a block. `own`: the keys include those of the queries, which come first."""

    piece: Piece
    keys: Index
    own: bool


def parts(pieces: Sequence[Piece], block: tuple[Ranges, ...], own: bool, joined: bool) -> Iterator[Part]:
    """Yield the parts of the pieces' attention to a block of keys.

    Args:
        block: the ranges of each sample whose keys the block has.
        own: the block has the queries' own keys.
        joined: a kernel takes own and earlier keys together; else they are two parts.
    """
    rows = [BlockRows.of(ranges) for ranges in block]
    for piece in pieces:
        samples, _, _, _, _, masked = piece
        before = rows[samples.start or 0].before
        first = before(piece.first)
        seen = first if piece.seen == piece.first else before(piece.seen)
        together = own and (joined or masked)
        if own:
            stop = first + piece.stop - piece.first
            yield Part(piece, (samples, EVERY, slice(seen if together else first, stop)), True)
        if seen < first and not together:
            yield Part(piece, (samples, EVERY, slice(seen, first)), False)


def pieces_of(
    documents: Documents | None, length: int, window: int, dealt: DealtTokens | None, chunks: bool = True
) -> Iterator[Piece]:
    """Yield a piece per document, or sample, and range of this rank's tokens.

    With a window and `chunks`, the first piece ends where the window is full. Each of the others has `_chunk` queries,
    and the keys of a window before them, of which the first is always masked. Without `chunks`, the kernel knows the
    window: a piece sees the keys that any of its queries sees.
    """
    for samples, own, ends in _samples(documents, length, dealt):
        row = 0
        for run in own:
            first = run.start
            while first < run.stop:
                number = bisect_right(ends, first)
                queries = range(first, min(run.stop, ends[number]))
                yield from _cut(
                    samples, row, queries, begin=ends[number - 1] if number else 0, window=window, chunks=chunks
                )
                row, first = row + len(queries), queries.stop


def _samples(
    documents: Documents | None, length: int, dealt: DealtTokens | None
) -> Iterator[tuple[slice, Ranges, list[int]]]:
    """Yield samples, this rank's ranges of them, and the ends of their documents. Equal samples come together."""
    if documents is None and (dealt is None or dealt.alike):
        yield slice(None), (range(length),) if dealt is None else dealt.of_rank(dealt.rank)[0], [length]
        return
    ends = [[length]] * (0 if dealt is None else len(dealt.ranges))
    if documents is not None:
        ends = [[span.stop for span in spans] for _, spans in groupby(documents.spans, lambda span: span.sample)]
    everything = ((range(length),),) * len(ends) if dealt is None else dealt.of_rank(dealt.rank)
    for sample, (own, stops) in enumerate(zip(everything, ends, strict=True)):
        yield slice(sample, sample + 1), own, stops


def _cut(samples: slice, row: int, queries: range, begin: int, window: int, chunks: bool) -> Iterator[Piece]:
    """Yield the pieces of queries of the document that begins at `begin`."""
    first, stop = queries.start, queries.stop
    if window and not chunks:
        begin = max(begin, first - window + 1)
        window = 0
    full = min(max(begin + window, first), stop) if window else stop
    if first < full:
        yield Piece(samples=samples, row=row, first=first, stop=full, seen=begin, masked=False)
    for at in range(full, stop, chunk(window)):
        yield Piece(
            samples=samples,
            row=row + at - first,
            first=at,
            stop=min(at + chunk(window), stop),
            seen=at - window,
            masked=True,
        )


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
