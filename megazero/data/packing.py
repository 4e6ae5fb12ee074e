"""Best-fit packing: the documents that share a sample, so that few are cut and little is padding.

s = sequence length, D = documents of a split. A packed sample has room for s + 1 tokens, as every sample.

A document of more than s + 1 tokens is cut: pieces of s + 1 tokens, of which neighbours share one token, and the rest.
So each token of a document, except its first, is a target exactly once. Full pieces are samples of their own. Documents
that fit, and the rests of others, are packed by best-fit decreasing (Ding et al. 2024, arXiv 2404.10830): longest
first, each goes where it leaves the least room. A document of one token has no target, and is in no sample.
"""

import functools
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megazero.data.epochs import EpochTable, RawStream, load_parts, permutation
from megazero.data.indexed import Int64s
from megazero.data.samples import NO_TOKEN, GPTDataset, Sample, require_vocabulary
from megazero.units import things

# Documents that are packed together. Memory grows with it; with fewer, more room is left.
WINDOW = 1 << 22


class Filling(NamedTuple):
    """Counts of an epoch of packed samples."""

    samples: int
    room: int  # tokens that the samples can hold
    tokens: int  # tokens that they hold; one that two pieces share counts twice
    targets: int
    cut: int  # documents that are longer than a sample

    @property
    def padding(self) -> float:
        """Share of the samples that holds no token."""
        return 1 - self.tokens / self.room

    @property
    def words(self) -> str:
        cut = f"{things(self.cut, 'document')} longer than a sample {'is' if self.cut == 1 else 'are'} cut"
        return f"{things(self.samples, 'sample')} per epoch, {self.padding:.2%} padding; {cut}"


class Packing(NamedTuple):
    """The samples of an epoch: first those of one full piece, then those of several documents. [..] int64.

    Attributes:
        full: the document of each full piece; its pieces are adjacent and in order.
        firsts: place in `documents` at which each other sample begins, and the end.
        documents: the documents of these samples. One that is cut stands for its rest.
        counts: of `Filling`.
    """

    full: Int64s
    firsts: Int64s
    documents: Int64s
    counts: Int64s

    @property
    def num_samples(self) -> int:
        return self.full.size + self.firsts.size - 1

    @property
    def filling(self) -> Filling:
        return Filling(*self.counts.tolist())


def pack_documents(lengths: npt.NDArray[Any], room: int, stream: RawStream, window: int = WINDOW) -> Packing:
    """Pack the documents of a split.

    Args:
        lengths: tokens of each document, [D].
        room: s + 1, the tokens of a sample.
        stream: of the permutation whose windows are packed one after another.
    """
    long = np.flatnonzero(lengths >= room)
    full = np.repeat(long, (lengths[long].astype(np.int64) - 1) // (room - 1))
    order, firsts, filled = permutation(stream, lengths.size), [np.zeros(1, np.int64)], 0
    tokens, targets = full.size * room, 0
    for at in range(0, order.size, window):
        documents = order[at : at + window]
        whole = lengths[documents].astype(np.int64)
        rests = rest(whole, room)
        kept = np.flatnonzero(rests > 1)
        kept = kept[_stable_order(room - rests[kept])]
        bins = best_fit(rests[kept], room)
        documents = documents[kept[_stable_order(bins)]]
        order[filled : filled + documents.size] = documents  # not beyond the window that is read
        firsts.append(filled + np.cumsum(np.bincount(bins)))
        filled += documents.size
        tokens += int(rests[kept].sum())
        targets += int((whole - 1).clip(0).sum())
    found = Packing(full, np.concatenate(firsts), order[:filled], np.empty(0, np.int64))
    samples, cut = found.num_samples, int((lengths > room).sum())
    return found._replace(
        counts=np.array(Filling(samples, room=samples * room, tokens=tokens, targets=targets, cut=cut))
    )


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


class PackedDataset(GPTDataset):
    """The endless samples of one split of one corpus, packed: `dataset[i]` for any i >= 0.

    Packed once. Each epoch has all samples, in an order of its own. Behind the documents of a sample come ids
    `NO_TOKEN`; they are a document of their own, and no target counts there.
    """

    def check(self, needed: Sequence[str] = ("train",)) -> None:
        """Raise ValueError if the split has no target: no document of two tokens; `needed` as in `GPTDataset`."""
        if not self.has_sample:
            raise ValueError(
                f"--data-path {self.data.prefix}: no document of its {self.split_name} split (--split {self.split}) "
                f"has two tokens, and --packing best-fit has no target elsewhere; the split holds {self.num_tokens} "
                f"tokens in {self.num_documents} of {self.data.num_documents} documents; {self._way_out(needed)}"
            )

    @functools.cached_property
    def has_sample(self) -> bool:
        """True if the split has a target."""
        return self.num_tokens > self.num_documents or bool((self._lengths() > 1).any())

    @property
    def least(self) -> str:
        return "a document of two tokens"

    def _lengths(self) -> npt.NDArray[Any]:
        return self._source.document_lengths(*self._range)

    @property
    def packing(self) -> Packing:
        """The samples of an epoch, in order; packed if the cache does not have them."""
        with self._tables_lock:  # a thread that needs them waits for the one that packs
            return self._packing

    @functools.cached_property
    def _packing(self) -> Packing:
        room, first = self.seq_length + 1, self._range[0]

        def build() -> Packing:
            found = pack_documents(self._lengths(), room, self._key.stream("packing", 0))
            return found._replace(full=found.full + first, documents=found.documents + first)

        name, count = self._key.name("packing"), len(Packing._fields)
        return Packing(*load_parts(self.data.prefix, name, build, [self.num_documents], stored_sizes=count))

    @property
    def num_samples(self) -> int:
        return self.packing.num_samples

    def __getitem__(self, index: int) -> Sample:
        """Return sample `index`; index >= 0, without upper limit."""
        assert index >= 0, index
        self.check()
        epoch, place = divmod(index, self.num_samples)
        return self._checked(index, self._drawn(epoch, place))

    def once(self, number: int) -> Sample:
        """Return sample `number` of an epoch, in the order before the shuffle."""
        return self.in_order(number)

    def _load(self, epoch: int) -> EpochTable:
        """Return the epoch's order of samples; that of the documents is the packing's."""
        stream, count, none = self._key.stream("packed samples", epoch), self.num_samples, np.empty(0, np.int64)
        name = self._key.name(f"packed{epoch}")
        (shuffle,) = load_parts(self.data.prefix, name, lambda: [permutation(stream, count)], [count])
        return EpochTable(none, none, shuffle)

    def _checked(self, index: int, in_stream: int) -> Sample:
        room, at = self.seq_length + 1, 0
        ids, starts = np.full(room, NO_TOKEN), np.empty(room, np.int64)
        counts = np.zeros(room, np.bool_)
        for document, skip in self._pieces(in_stream):
            begin, end = self._source.span(document, skip, room)
            part = self.data.tokens(begin, end)
            if len(part) < 2 or at + len(part) > room:
                raise ValueError(
                    f"--data-path {self.data.prefix}: a sample of {room} tokens has no place for {part.size} of "
                    f"document {document} behind {at} others, because its table belongs to another corpus; delete "
                    f"{self.data.prefix}_index_cache, and resume from the last checkpoint"
                )
            stop = at + part.size
            ids[at:stop], starts[at:stop], counts[at : stop - 1] = part, at, self.data.mask(begin + 1, end)
            at = stop
        starts[at:] = at
        if self.vocab_size is not None:
            where = f"sample {index} of {self.split_name}"
            require_vocabulary(self.data.prefix, ids[:at], self.vocab_size, where)
        return Sample(ids, counts[:-1], starts[:-1])

    def _pieces(self, number: int) -> list[tuple[int, int]]:
        """Return (document, its first token here) of each piece in sample `number` of the packing."""
        full, firsts, documents, _ = self.packing
        if number < full.size:
            document = int(full[number])
            return [(document, (number - int(np.searchsorted(full, document))) * self.seq_length)]
        first, stop = firsts[number - full.size : number - full.size + 2].tolist()
        found = []
        for document in documents[first:stop].tolist():
            lengths = self._source.document_lengths(document, document + 1).astype(np.int64)
            found.append((document, int((lengths - rest(lengths, self.seq_length + 1))[0])))
        return found
