"""From documents to numbered samples: which tokens are sample i of a run.

s = sequence length, N = tokens of a split, D = its documents.

The stream of a split is its epochs one after another; an epoch is the split's documents in a random order.
Sample i of the stream is tokens [i s, i s + s]: s + 1 tokens, for inputs and targets; two neighbours share
one token, and a sample may run across documents and into the next epoch. The samples that begin in one
epoch are shuffled among themselves. So what `dataset[i]` is depends on (corpus, split, s, seed) only: not
on the length of the run, the batch size or the layout, and a run can be extended or its layout changed.
"""

import os
import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from math import lcm
from typing import Any, NamedTuple, Protocol

import numpy as np

from megazero.data.about import SAMPLED_BYTES, read_about, verify
from megazero.data.epochs import EpochKey, EpochTable, load_table
from megazero.data.fingerprint import index_fingerprint
from megazero.data.indexed import IndexedDataset, Int64s, Tokens

SPLITS = ("train", "validation", "test")
# Tables kept in memory at once: the running epoch, the next, and one for whoever looks back.
KEPT_EPOCHS = 3
# How much of each end of a corpus without PREFIX.json is read in search of ids outside the vocabulary.
SCANNED_BYTES = 64 << 20


class Samples(Protocol):
    """Anything with samples numbered from 0 without end: `samples[i]` is int64 [s + 1]."""

    def __getitem__(self, index: int) -> Int64s: ...


def split_ranges(split: str, num_documents: int) -> dict[str, tuple[int, int]]:
    """Document range [start, stop) of train, validation and test for a --split such as "969,30,1".

    One to three weights >= 0, normalised; missing ones are 0. Borders are the rounded running sums, as in
    Megatron.
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


class GPTDataset:
    """The endless samples of one split of one corpus: `dataset[i]` is int64 [s + 1] for any i >= 0.

    `data` is the corpus or its prefix. `num_documents` and `num_tokens` are those of the split. An
    empty or too short split raises at `check()` and at the first sample, not before: nobody may ever ask
    for it. Ids outside `vocab_size` (None: not checked) raise at the sample that holds them.
    """

    def __init__(
        self,
        data: str | os.PathLike[str] | IndexedDataset,
        split: str,
        split_name: str,
        seq_length: int,
        seed: int,
        vocab_size: int | None = None,
    ) -> None:
        assert seq_length > 0 and split_name in SPLITS, (seq_length, split_name)
        self.data = data if isinstance(data, IndexedDataset) else IndexedDataset(data)
        self._arguments = (self.data, split, split_name, seq_length, seed, vocab_size)
        self.split, self.split_name = split, split_name
        self.seq_length, self.vocab_size = seq_length, vocab_size
        first, stop = split_ranges(split, self.data.num_documents)[split_name]
        begin, end = self.data.document_starts(first, stop + 1)[[0, -1]].tolist()
        self.num_documents, self.num_tokens = stop - first, end - begin
        self._key = EpochKey(index_fingerprint(self.data), first, stop, self.num_tokens, seq_length, seed)
        self._tables: dict[int, EpochTable] = {}  # by epoch, oldest use first

    def __reduce__(self) -> tuple[type["GPTDataset"], tuple[Any, ...]]:
        return GPTDataset, self._arguments  # a worker process maps the files itself

    def check(self) -> None:
        """ValueError if the split is too short for a single sample."""
        if self.num_tokens < self.seq_length + 1:
            raise ValueError(
                f"--data-path {self.data.prefix}: its {self.split_name} split (--split {self.split}) holds "
                f"{self.num_tokens} tokens in {self.num_documents} of {self.data.num_documents} documents, "
                f"fewer than one sample of --seq-length {self.seq_length} + 1; give more data, a shorter "
                f"sequence or a larger weight in --split"
            )

    def __getitem__(self, index: int) -> Int64s:
        """Sample `index`, int64 [s + 1]; index >= 0, without upper limit."""
        assert index >= 0, index
        self.check()
        epoch = index * self.seq_length // self.num_tokens
        first, _ = self._key.sample_range(epoch)
        in_stream = first + int(self._table(epoch).shuffle[index - first])
        ids = self._stream(in_stream * self.seq_length, self.seq_length + 1)
        if self.vocab_size is not None:
            where = f"sample {index} of {self.split_name}"
            _require_vocabulary(self.data.prefix, ids, self.vocab_size, where)
        return ids

    def _table(self, epoch: int) -> EpochTable:
        table = self._tables.pop(epoch, None) or load_table(self.data, self._key, epoch)
        self._tables[epoch] = table
        if len(self._tables) > KEPT_EPOCHS:
            del self._tables[next(iter(self._tables))]
        return table

    def _stream(self, position: int, count: int) -> Int64s:
        """Tokens [position, position + count) of the stream, int64 [count]."""
        ids = np.empty(count, dtype=np.int64)
        filled = 0
        while filled < count:
            epoch, at = divmod(position + filled, self.num_tokens)
            table = self._table(epoch)
            place = int(np.searchsorted(table.starts, at, side="right")) - 1  # past any empty documents
            while filled < count and place < self.num_documents:
                skip = at - int(table.starts[place])
                part = self.data.document(int(table.order[place]), skip, count - filled)
                ids[filled : filled + part.size] = part
                filled += part.size
                at += part.size
                place += 1
        return ids


def _require_vocabulary(prefix: str, ids: Tokens, vocab_size: int, where: str) -> None:
    """ValueError unless all ids lie in [0, vocab_size)."""
    low, high = int(ids.min(initial=0)), int(ids.max(initial=0))
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"--data-path {prefix}: {where} holds token id {low if low < 0 else high}, outside the "
            f"vocabulary of {vocab_size}; give the --tokenizer that the corpus was preprocessed with, or "
            f"preprocess it again"
        )


class BlendedDataset:
    """Samples drawn from several datasets in proportion to weights, always in the same order.

    Which dataset serves sample i, and which of its samples, is a closed formula in i: no table, no loop
    over what came before. Megatron goes through the samples and gives each to the dataset that is furthest
    behind its share. For two datasets that rule has the closed form of `_behind_count`, used here; for
    more, they are paired in a binary tree, and the rule decides at every fork. After any i samples, a
    dataset's count differs from i times its share by less than the depth of the tree.
    """

    def __init__(self, datasets: Sequence[Samples], weights: Sequence[Fraction | int | float | str]) -> None:
        shares = [Fraction(weight) for weight in weights]
        assert len(shares) == len(datasets) > 0 and min(shares) > 0, weights
        self.datasets = tuple(datasets)
        scale = lcm(*(share.denominator for share in shares))
        # Running sums of whole weights: exact at any i. Python integers do not overflow.
        self._sums = list(accumulate((int(share * scale) for share in shares), initial=0))

    def locate(self, index: int) -> tuple[int, int]:
        """(number of the dataset, number of the sample in it) of sample `index`."""
        first, stop = 0, len(self.datasets)
        while stop - first > 1:
            middle = self._middle(first, stop)
            left, right = self._sums[middle] - self._sums[first], self._sums[stop] - self._sums[middle]
            before = _behind_count(left, right, index)
            if _behind_count(left, right, index + 1) > before:
                stop, index = middle, before
            else:
                first, index = middle, index - before
        return first, index

    def _middle(self, first: int, stop: int) -> int:
        """Where to part the datasets [first, stop): as near to equal weight as can be."""
        sums = self._sums
        return min(range(first + 1, stop), key=lambda k: abs(sums[k] - sums[first] - (sums[stop] - sums[k])))

    def __getitem__(self, index: int) -> Int64s:
        number, sample = self.locate(index)
        return self.datasets[number][sample]


def _behind_count(left: int, right: int, index: int) -> int:
    """How many of the samples [0, index) go to the left of two datasets, of weights left and right.

    Megatron's rule for sample n: the dataset with the larger share * max(n, 1) - count; of equals, the
    left. For two that is: left iff left * n >= count * (left + right), whose solutions are these two, by
    who goes first.
    """
    if index == 0:
        return 0
    total = left + right
    if left >= right:
        return left * (index - 1) // total + 1
    # The right goes first, and then whenever the left is not behind: right's count is a ceiling.
    return index - max(1, -(-right * (index - 1) // total))


def parse_data_path(data_path: Sequence[str]) -> list[tuple[Fraction, str]]:
    """[(weight, prefix)] of --data-path PREFIX or W1 PREFIX1 W2 PREFIX2 ..."""
    if len(data_path) == 1:
        return [(Fraction(1), data_path[0])]
    given = "--data-path " + " ".join(data_path)
    if len(data_path) % 2 or not data_path:
        raise ValueError(f"{given}: expected PREFIX, or pairs W1 PREFIX1 W2 PREFIX2 ...")
    pairs = []
    for weight, prefix in zip(data_path[::2], data_path[1::2], strict=True):
        number = re.fullmatch(r"(\d*\.?\d+|\d+\.)(e[+-]?\d{1,3})?", weight, re.IGNORECASE)
        if not number or Fraction(weight) == 0:
            raise ValueError(f"{given}: weight {weight!r} of {prefix} must be a number above 0, such as 0.3")
        pairs.append((Fraction(weight), prefix))
    return pairs


class Datasets(NamedTuple):
    """The splits of a run. An empty one raises when its first sample is asked for."""

    train: Samples
    validation: Samples
    test: Samples


def open_datasets(data_path: Sequence[str], split: str, seq_length: int, seed: int, vocab_size: int | None) -> Datasets:
    """Open the corpora of --data-path. Raises ValueError as `IndexedDataset` and `parse_data_path` do."""
    corpora = [(IndexedDataset(prefix), weight) for weight, prefix in parse_data_path(data_path)]

    def opened(split_name: str) -> Samples:
        parts = [GPTDataset(data, split, split_name, seq_length, seed, vocab_size) for data, _ in corpora]
        return parts[0] if len(parts) == 1 else BlendedDataset(parts, [w for _, w in corpora])

    return Datasets(*(opened(name) for name in SPLITS))


def validate(
    data_path: Sequence[str],
    split: str,
    seq_length: int,
    vocab_size: int | None,
    *,
    evaluation: bool = False,
) -> None:
    """Raise ValueError for whatever is wrong with the data; to be called before any process group starts.

    Files are checked as `IndexedDataset` does, and a sample of them against the checksums in PREFIX.json;
    train (and validation, with `evaluation`) must hold one sample; ids must lie below `vocab_size`: known
    from PREFIX.json, else from a scan of the first and last 64 MiB of tokens.
    """
    corpora = parse_data_path(data_path)
    for _, prefix in corpora:
        data = IndexedDataset(prefix)
        verify(data, SAMPLED_BYTES // len(corpora))
        for split_name in ("train", "validation") if evaluation else ("train",):
            GPTDataset(data, split, split_name, seq_length, seed=0).check()
        if vocab_size is not None:
            _check_vocabulary(data, vocab_size)


def _check_vocabulary(data: IndexedDataset, vocab_size: int) -> None:
    largest = read_about(data).get("max_id")
    if isinstance(largest, int):
        parts = [np.array([largest])]
    else:
        count, end = SCANNED_BYTES // data.dtype.itemsize, data.num_tokens
        parts = [data.tokens(0, min(count, end)), data.tokens(max(0, end - count), end)]
    for ids in parts:
        _require_vocabulary(data.prefix, ids, vocab_size, "the corpus")
