"""From documents to numbered samples: the tokens of sample i of a run.

s = sequence length, N = tokens of a split, D = its documents.

The stream of a split is its epochs one after another; an epoch is the split's documents in a random order.
Sample i of the stream is its tokens i s to i s + s: s + 1 tokens, of which the first s are inputs and the last s are
targets. So two neighbours share one token. A sample may run across documents and into the next epoch. The samples that
begin in one epoch are shuffled among themselves. So `dataset[i]` depends on (corpus, split, s, seed) only, not on the
length of the run, the batch size or the layout: a run can be extended, or resumed in another layout.
The bytes of the corpus' mask, if it has one, decide which targets count.
"""

import functools
import itertools
import os
import threading
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np

from megazero.data.epochs import EpochKey, EpochTable, load_table
from megazero.data.indexed import IndexedDataset, Int64s, Mask, Tokens
from megazero.units import things

SPLITS = ("train", "validation", "test")
# Weights in per cent of validation and test that are tried in search of a --split that fits.
SHARES = (0, 1, 2, 5, 10, 20, 33)
KEPT_EPOCHS = 3  # epochs whose tables stay in memory: the current one, the next, and an earlier one
NO_TOKEN = -1  # the id of padding, as an input or a target: it counts in no loss


class Sample(NamedTuple):
    """s + 1 tokens: the first s are inputs, the last s targets."""

    ids: Int64s  # [s + 1]; `NO_TOKEN` for padding
    counts: Mask | None = None  # [s]: whether each target counts; None: each that is no padding
    starts: Int64s | None = None  # [s]: index at which each input's document begins; None: it is not known here


class Samples(Protocol):
    """Anything with samples numbered from 0 without end. Several threads may read it."""

    def __getitem__(self, index: int) -> Sample: ...


def split_ranges(split: str, num_documents: int) -> dict[str, tuple[int, int]]:
    """Return the document ranges [start, stop) of train, validation and test for a --split such as "969,30,1".

    --split is one to three weights >= 0. They are divided by their sum, and missing ones are 0. The borders of the
    ranges are the running sums of the weights, rounded to documents, as in Megatron.
    """
    try:
        weights = [float(part) for part in split.split(",")]
    except ValueError:
        weights = []
    total = sum(weights)
    if not 1 <= len(weights) <= 3 or min(weights) < 0 or not 0 < total < float("inf"):
        raise ValueError(
            f"--split {split}: expected up to three weights >= 0 for train,validation,test, such as 969,30,1"
        )
    weights += [0.0] * (3 - len(weights))
    shares = accumulate((weight / total for weight in weights), initial=0.0)
    borders = [min(round(share * num_documents), num_documents) for share in shares]
    return {name: (borders[k], borders[k + 1]) for k, name in enumerate(SPLITS)}


def splits_by_tokens(split: str, split_by: str, num_documents: int) -> bool:
    """Return true if a corpus is split at tokens, inside documents, and not between documents.

    --split-by auto does this if a split with a weight above 0 would get no document. With 969,30,1, that is a corpus
    of up to 500 documents.
    """
    if split_by != "auto":
        return split_by == "tokens"
    asked = split_ranges(split, 1 << 52)  # of so large a corpus, only a weight of 0 gets no document
    return any(
        first == stop and asked[name][0] < asked[name][1]
        for name, (first, stop) in split_ranges(split, num_documents).items()
    )


class TokenRange:
    """Tokens [begin, end) of a corpus, read like a corpus whose first and last documents may be cut off."""

    def __init__(self, data: IndexedDataset, begin: int, end: int) -> None:
        assert 0 <= begin <= end <= data.num_tokens, (begin, end)
        starts = data.document_starts(0, data.num_documents + 1)
        first = int(np.searchsorted(starts, begin, side="right")) - 1
        stop = max(first, int(np.searchsorted(starts, end)))
        self._data, self._starts = data, starts[first : stop + 1].clip(begin, end)
        self.prefix, self.num_documents, self.num_tokens = data.prefix, stop - first, end - begin
        self._range = (begin, end)

    @property
    def index_fingerprint(self) -> str:
        """Fingerprint of the corpus, with the range of tokens."""
        return f"{self._data.index_fingerprint}, tokens {self._range}"

    def document_lengths(self, first: int, stop: int) -> Int64s:
        """Return the number of tokens of each document in [first, stop), int64."""
        return np.diff(self._starts[first : stop + 1])

    def span(self, index: int, skip: int = 0, limit: int | None = None) -> tuple[int, int]:
        """Return the range in the corpus of at most `limit` tokens of one document from its token `skip` on."""
        start, stop = self._starts[index : index + 2].tolist()
        start = min(start + skip, stop)
        return start, stop if limit is None else min(stop, start + limit)


class GPTDataset:
    """The endless samples of one split of one corpus: `dataset[i]` for any i >= 0.

    An empty or too short split raises at `check()` and at the first sample, not before, because a run may never read
    it. Ids outside `vocab_size` (None: not checked) raise at the sample that holds them.

    Attributes:
        data: the corpus; the constructor also takes its prefix.
        num_documents, num_tokens: of the split.
        by_tokens: the corpus is split inside documents, see `splits_by_tokens`.
    """

    def __init__(
        self,
        data: str | os.PathLike[str] | IndexedDataset,
        split: str,
        split_name: str,
        seq_length: int,
        seed: int,
        vocab_size: int | None = None,
        split_by: str = "auto",
    ) -> None:
        assert seq_length > 0 and split_name in SPLITS, (seq_length, split_name)
        self.data = data if isinstance(data, IndexedDataset) else IndexedDataset(data)
        self.split, self.split_name = split, split_name
        self.seq_length, self.vocab_size = seq_length, vocab_size
        self.by_tokens = splits_by_tokens(split, split_by, self.data.num_documents)
        self._source: IndexedDataset | TokenRange = self.data
        if self.by_tokens:
            self._source = TokenRange(self.data, *split_ranges(split, self.data.num_tokens)[split_name])
            first, stop, self.num_tokens = 0, self._source.num_documents, self._source.num_tokens
        else:
            first, stop = split_ranges(split, self.data.num_documents)[split_name]
            begin, end = (int(self.data.document_starts(at, at + 1)[0]) for at in (first, stop))
            self.num_tokens = end - begin
        self.num_documents = stop - first
        self._range, self._seed = (first, stop), seed
        self._split_by = split_by
        self._tables: dict[int, EpochTable] = {}  # by epoch, oldest use first
        self._tables_lock = threading.RLock()

    @functools.cached_property
    def _key(self) -> EpochKey:
        # Computed at the first sample, because most of 10,000 corpora are not read for a long time.
        return EpochKey(self._source.index_fingerprint, *self._range, self.num_tokens, self.seq_length, self._seed)

    @property
    def has_sample(self) -> bool:
        """True if the split is long enough for a sample."""
        return self.num_tokens > self.seq_length

    def check(self, needed: Sequence[str] = ("train",)) -> None:
        """Raise ValueError if the split is too short for a single sample.

        needed: the splits that the run reads, for advice.
        """
        if not self.has_sample:
            raise ValueError(
                f"--data-path {self.data.prefix}: its {self.split_name} split (--split {self.split}) holds "
                f"{self.num_tokens} tokens in {self.num_documents} of {self.data.num_documents} documents, "
                f"fewer than one sample of --seq-length {self.seq_length} + 1; {self._way_out(needed)}"
            )

    @property
    def least(self) -> str:
        """The least that a split can hold."""
        return f"{self.seq_length + 1} tokens"

    def _way_out(self, needed: Sequence[str]) -> str:
        """Return a --split in which this split and those in `needed` have samples, if it fits each with a weight."""
        asked, drop = split_ranges(self.split, 1 << 52), ""
        if self.split_name != "train":
            drop = ", or drop --eval-interval"
        fewest = [name for name in SPLITS if name in (*needed, self.split_name)]
        given = [name for name in SPLITS if name in fewest or asked[name][0] < asked[name][1]]

        def fits(name: str, split: str, split_by: str) -> bool:
            return type(self)(self.data, split, name, self.seq_length, self._seed, split_by=split_by).has_sample

        for names, split_by, share in itertools.product((given, fewest), (self._split_by, "tokens"), SHARES):
            weights = [share * (name in names) for name in SPLITS[1:]]
            split = ",".join(map(str, (100 - sum(weights), *weights)))
            if all(fits(name, split, split_by) for name in names):
                return f"give --split {split}{'' if split_by == self._split_by else f' --split-by {split_by}'}{drop}"
        return (
            f"no --split is enough for {' and '.join(fewest)}, {self.least} each, because the corpus has "
            f"{things(self.data.num_tokens, 'token')}: give more data or a shorter sequence{drop}"
        )

    def __getitem__(self, index: int) -> Sample:
        """Return sample `index`; index >= 0, without upper limit."""
        assert index >= 0, index
        self.check()
        epoch = index * self.seq_length // self.num_tokens
        first, _ = self._key.sample_range(epoch)
        return self._checked(index, first + self._drawn(epoch, index - first))

    def in_order(self, number: int) -> Sample:
        """Return sample `number` of the stream, in the order before the shuffle."""
        self.check()
        return self._checked(number, number)

    @property
    def num_samples(self) -> int:
        """Samples of one pass over the split."""
        return max(0, -(-(int(self.num_tokens) - 1) // self.seq_length))

    def once(self, number: int) -> Sample:
        """Return sample `number` of one pass, in order. Ids behind the split's last token are `NO_TOKEN`."""
        found = self.in_order(number)
        found.ids[max(0, self.num_tokens - number * self.seq_length) :] = NO_TOKEN
        return found

    def _checked(self, index: int, in_stream: int) -> Sample:
        ids, mask = self._stream(in_stream * self.seq_length, self.seq_length + 1)
        if self.vocab_size is not None:
            where = f"sample {index} of {self.split_name}"
            require_vocabulary(self.data.prefix, ids, self.vocab_size, where)
        return Sample(ids, None if mask is None else mask[1:])

    def _table(self, epoch: int) -> EpochTable:
        with self._tables_lock:  # a thread that needs a table waits for the one that computes it
            table = self._tables.pop(epoch, None) or self._load(epoch)
            self._tables[epoch] = table
            if len(self._tables) > KEPT_EPOCHS:
                del self._tables[next(iter(self._tables))]
        return table

    def _drawn(self, epoch: int, place: int) -> int:
        """Return the sample of an epoch that its shuffle has at a place; both are counted from 0."""
        shuffle = self._table(epoch).shuffle
        drawn = int(shuffle[place])
        if not 0 <= drawn < len(shuffle):
            raise ValueError(
                f"--data-path {self.data.prefix}: epoch {epoch} has {shuffle.size} samples, and its table names sample "
                f"{drawn}; delete {self.data.prefix}_index_cache, and resume from the last checkpoint"
            )
        return drawn

    def _load(self, epoch: int) -> EpochTable:
        return load_table(self._source, self._key, epoch)

    def _stream(self, position: int, count: int) -> tuple[Int64s, Mask | None]:
        """Return tokens [position, position + count) of the stream, int64 [count], and their mask if there is one."""
        ids = np.empty(count, dtype=np.int64)
        mask = np.empty(count, dtype=np.bool_) if self.data.masked else None
        filled = 0
        while filled < count:
            epoch, at = divmod(position + filled, self.num_tokens)
            table = self._table(epoch)
            place = int(np.searchsorted(table.starts, at, side="right")) - 1  # skips empty documents
            before = filled
            while filled < count and place < self.num_documents:
                skip = at - int(table.starts[place])
                start, stop = self._source.span(int(table.order[place]), skip, count - filled)
                end = filled + stop - start
                ids[filled:end] = self.data.tokens(start, stop)
                if mask is not None:
                    mask[filled:end] = self.data.mask(start, stop)
                at += end - filled
                filled = end
                place += 1
            if filled == before:
                raise ValueError(
                    f"--data-path {self.data.prefix}: no document of epoch {epoch} holds its token {at}, because its "
                    f"sample table belongs to another corpus; delete {self.data.prefix}_index_cache, and resume from "
                    "the last checkpoint"
                )
        return ids, mask


class WholeSplit:
    """One pass over a split of one corpus: each of its tokens, except the first, is a target in exactly one sample.

    With packed documents: except the first of each document. Samples are in order. Behind the last come samples of ids
    `NO_TOKEN`, as padding of the last global batch.
    """

    def __init__(self, dataset: GPTDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return self.dataset.num_samples

    def __getitem__(self, index: int) -> Sample:
        """Return sample `index`; index >= 0, without upper limit."""
        if index >= len(self):
            return Sample(np.full(self.dataset.seq_length + 1, NO_TOKEN))
        return self.dataset.once(index)


def require_vocabulary(prefix: str, ids: Tokens, vocab_size: int, where: str) -> None:
    """Raise ValueError unless all ids are in [0, vocab_size)."""
    low, high = int(ids.min(initial=0)), int(ids.max(initial=0))
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"--data-path {prefix}: {where} holds token id {low if low < 0 else high}, outside the "
            f"vocabulary of {vocab_size}; leave --vocab-size out, give the --tokenizer that the corpus was "
            f"preprocessed with (megatron:FILE.model, if Megatron-LM's SentencePieceTokenizer), or preprocess it again"
        )
