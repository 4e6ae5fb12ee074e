"""Attention in pieces: queries that see the same first key, and the keys of a block that they see. And its kernels.

Shapes: b micro-batch, s tokens of a sample, t those of a sample on this rank, n heads, g groups of keys and values,
d head dim, q queries, L keys.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import Any, NamedTuple, Self

import torch

from megazero import torch_private
from megazero.engine.kernels.eager import Tensors
from megazero.engine.model.context_parallel.dealt import DealtTokens, Ranges
from megazero.engine.model.documents import Documents
from megazero.engine.model.scores import Scores

ALIGNMENT = 8  # elements of a mask's row that GPUs read together
LEAST_CHUNK = 64  # queries of a window's pieces: fewer cost more in calls than they save in masked keys

EVERY = slice(None)
Index = tuple[slice, slice, slice]  # indexes [b, heads, tokens, ..]


class Piece(NamedTuple):
    """The queries [first, stop) of some samples, which see keys of [seen, stop)."""

    samples: slice
    row: int  # of the first query among this rank's tokens of a sample
    first: int
    stop: int
    seen: int
    masked: bool  # by a window: the keys are those of a window before the first query, and of the queries

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
    def of(cls, ranges: Ranges) -> Self:
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
    if documents is None and (dealt is None or len(set(dealt.ranges)) == 1):
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
        yield Piece(samples, row, first, full, seen=begin, masked=False)
    for at in range(full, stop, chunk(window)):
        end = min(at + chunk(window), stop)
        yield Piece(samples, row + at - first, at, end, seen=at - window, masked=True)


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


class CpuKernel:
    """torch's kernel for CPUs, below autograd. It takes square causal scores, all scores, or a mask.

    Attributes:
        joined: a kernel attends to earlier and own keys together; else they are two parts.
    """

    joined = False

    def __init__(self, like: torch.Tensor, scores: Scores) -> None:
        self.mask, self.scale = window_mask(like, scores.window), scores.scale or None

    def _options(self, part: Part) -> tuple[bool, dict[str, Any]]:
        mask = part.piece.of(self.mask) if part.own else None
        return part.own and mask is None, {"attn_mask": mask, "scale": self.scale}

    def forward(self, part: Part, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
        """q [b, n, q, d], k and v [b, g, L, d] -> output [b, n, q, d], log-sum-exp of the scores [b, n, q]"""
        causal, options = self._options(part)
        found: Tensors = torch_private.CPU_ATTENTION(q, k, v, 0.0, causal, **options)
        return found

    def backward(self, part: Part, dy: torch.Tensor, *saved: torch.Tensor) -> Tensors:
        """Return the gradients of q, k and v. `saved`: q, k, v; output and log-sum-exp over all keys of the queries."""
        causal, options = self._options(part)
        found: Tensors = torch_private.CPU_ATTENTION_BACKWARD(dy, *saved, 0.0, causal, **options)
        return found


class FlashKernel:
    """FlashAttention, with the methods of `CpuKernel`.

    It knows windows. The last of fewer causal queries than keys sees all keys.
    """

    joined = True

    def __init__(self, scores: Scores) -> None:
        self.window, self.scale = scores.window, scores.scale or None

    def _options(self, part: Part, q: torch.Tensor, k: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        limits = None, None, q.shape[1], k.shape[1], 0.0, part.own and not self.window
        windowed = part.own and self.window
        window = {"window_size_left": self.window - 1, "window_size_right": 0} if windowed else {}
        return limits, {"scale": self.scale, **window}

    def forward(self, part: Part, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
        heads = [x.transpose(1, 2) for x in (q, k, v)]
        limits, options = self._options(part, *heads[:2])
        y, log_sums, *_ = torch_private.FLASH_ATTENTION(*heads, *limits, False, **options)
        return y.transpose(1, 2), log_sums

    def backward(self, part: Part, dy: torch.Tensor, *saved: torch.Tensor) -> Tensors:
        *heads, log_sums = saved
        dy, q, k, v, y = (x.transpose(1, 2) for x in (dy, *heads))
        limits, options = self._options(part, q, k)
        # without dropout, the state of the random generator is not used
        state, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), q.new_empty(0)
        found = torch_private.FLASH_ATTENTION_BACKWARD(
            dy, q, k, v, y, log_sums.contiguous(), *limits, state, unused, **options
        )
        return tuple(x.transpose(1, 2) for x in found)


def merge_(y: torch.Tensor, log_sums: torch.Tensor, more: torch.Tensor, more_sums: torch.Tensor) -> None:
    """Merge the attention to more keys into y [.., d] and log_sums [..]: means weighted by the sums of exponentials.

    The weight is a sigmoid, so no exponential overflows.
    """
    y.lerp_(more.to(y.dtype), torch.sigmoid(more_sums - log_sums)[..., None].to(y.dtype))
    log_sums.copy_(torch.logaddexp(log_sums, more_sums))
