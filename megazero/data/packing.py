"""Best-fit packing: the documents that share a sample, so that few are cut and little is padding.

s = sequence length, D = documents of a split. A packed sample has room for s + 1 tokens, as every sample.

A document of more than s + 1 tokens is cut: pieces of s + 1 tokens, of which neighbours share one token, and the rest.
So each token of a document, except its first, is a target exactly once. Full pieces are samples of their own. The rests,
and the documents that fit, are packed by best-fit decreasing (Ding et al. 2024, arXiv 2404.10830): longest first, each
goes where it leaves the least room. A document of one token has no target, and is in no sample.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megazero.data.epochs import RawStream, permutation
from megazero.data.indexed import Int64s

# Documents that are packed together. Memory grows with it; with fewer, more room is left.
WINDOW = 1 << 22


class Packing(NamedTuple):
    """The samples of an epoch: first those of one full piece, then those of several documents. [..] int64.

    Attributes:
        full: the document of each full piece; its pieces are adjacent and in order.
        firsts: place in `documents` at which each other sample begins, and the end.
        documents: the documents of these samples. One that is cut stands for its rest.
    """

    full: Int64s
    firsts: Int64s
    documents: Int64s


def pack(lengths: npt.NDArray[Any], room: int, stream: RawStream, window: int = WINDOW) -> Packing:
    """Pack the documents of a split.

    Args:
        lengths: tokens of each document, [D].
        room: s + 1, the tokens of a sample.
        stream: of the permutation whose windows are packed one after another.
    """
    long = np.flatnonzero(lengths > room - 1)
    full = np.repeat(long, (lengths[long].astype(np.int64) - 1) // (room - 1))
    order, firsts, filled, opened = permutation(stream, lengths.size), [np.zeros(1, np.int64)], 0, 0
    for at in range(0, order.size, window):
        documents = order[at : at + window]
        rests = rest(lengths[documents].astype(np.int64), room)
        documents, rests = documents[rests > 1], rests[rests > 1]
        longest_first = _stable_order(room - rests)
        documents, rests = documents[longest_first], rests[longest_first]
        bins = best_fit(rests, room)
        in_bins = _stable_order(bins)
        order[filled : filled + documents.size] = documents[in_bins]  # before `at`: nothing is overwritten unread
        firsts.append(filled + np.cumsum(np.bincount(bins)))
        filled += documents.size
    return Packing(full, np.concatenate(firsts), order[:filled])


def rest(lengths: Int64s, room: int) -> Int64s:
    """Return the tokens of each document that are left for a packed sample: all, or those behind its full pieces."""
    return np.where(lengths < room, lengths, (lengths - 1) % (room - 1) + 1)


def best_fit(lengths: Int64s, room: int) -> Int64s:
    """Return the bin of each item, numbered in the order in which they are opened: best-fit decreasing.

    An item goes to the bin with the least space that is enough, of equals to the one that has had this space the
    longest, else to a new one. Bins of equal space are filled by items of equal length in one operation on arrays, so
    the work grows with the pairs of a length and a space that meet, not with the items.

    Args:
        lengths: in decreasing order, 1 to `room`.
        room: space of an empty bin.
    """
    bins = np.empty(lengths.size, np.int64)
    spaces: defaultdict[int, deque[Int64s]] = defaultdict(deque)  # space -> bins, those that have had it longest first
    present = 0  # bit k: some bin has space k
    done, opened = 0, 0
    counts = np.bincount(lengths)
    shortest = int(lengths[-1]) if lengths.size else 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        count = int(counts[length])
        while count:
            enough = present >> length
            if enough:
                space = length + (enough & -enough).bit_length() - 1
                held = spaces[space]
                found = held.popleft()
                fit = space // length
                used = min(found.size, -(-count // fit))
                if used < found.size:
                    held.appendleft(found[used:])
                elif not held:
                    present ^= 1 << space
            else:
                space, fit = room, room // length
                used = -(-count // fit)
                found = np.arange(opened, opened + used)
                opened += used
            placed = min(count, used * fit)
            bins[done : done + placed] = np.repeat(found[:used], fit)[:placed]
            whole, more = divmod(placed, fit)
            for part, left in ((found[:whole], space - fit * length), (found[whole:used], space - more * length)):
                if part.size and left >= shortest:
                    spaces[left].append(part)
                    present |= 1 << left
            done, count = done + placed, count - placed
    return bins


def _stable_order(values: Int64s) -> Int64s:
    """Return the stable argsort of numbers >= 0, which together with an index have at most 63 bits."""
    bits = max(1, (values.size - 1).bit_length())
    packed = values << bits | np.arange(values.size)
    packed.sort()
    return packed & ((1 << bits) - 1)
