"""Requests of tasks for log-likelihoods, and the samples that hold them: docs/tasks.md.

s = sequence length, R = requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from megazero.data.indexed import Int64s
from megazero.data.packing import best_fit
from megazero.data.samples import NO_TOKEN, Sample
from megazero.data.task_files import Item, TaskItems, TextItem
from megazero.data.tokenizer import Tokenizer

NO_REQUEST = -1  # in place of a request's number


class Pair(NamedTuple):
    """Token ids. The log-likelihood of `continuation` after `context` is wanted."""

    context: list[int]
    continuation: list[int]

    def fitted(self, length: int) -> Pair:
        """Return the pair with the last tokens of the context that fit, with all others, in s + 1 tokens."""
        kept = min(len(self.context), length + 1 - len(self.continuation))
        return Pair(self.context[len(self.context) - kept :], self.continuation)

    def windows(self, length: int) -> Iterator[Pair]:
        """Yield parts of s tokens of the continuation, each after the tokens before it."""
        ids = [*self.context, *self.continuation]
        for start in range(len(self.context), len(ids), length):
            before = ids[max(0, start - length) : start]  # `fitted` keeps no more, and a text may be long
            yield Pair(before, ids[start : start + length]).fitted(length)


class EncodedTasks(NamedTuple):
    """The items of --tasks with their pairs: one per option of a choice, one of other items."""

    tasks: TaskItems
    pairs: tuple[tuple[Pair, ...], ...]

    def requests(self, length: int) -> TaskRequests:
        """Return the requests for samples of s = `length` inputs.

        Raises:
            ValueError: a continuation is longer than a sample.
        """
        found = []
        for item, place, pairs in zip(self.tasks.items, self.tasks.places, self.pairs, strict=True):
            if isinstance(item, TextItem):
                found.append([window for pair in pairs for window in pair.windows(length)])
                continue
            longest = max(len(pair.continuation) for pair in pairs)
            if longest > length:
                raise ValueError(
                    f"{place}: a continuation has {longest} tokens, more than --seq-length {length}; leave the item "
                    "out, or train with longer samples"
                )
            found.append([pair.fitted(length) for pair in pairs])
        firsts = tuple(accumulate(map(len, found), initial=0))
        return TaskRequests(self.tasks, tuple(pair for pairs in found for pair in pairs), firsts)


class TaskRequests(NamedTuple):
    """The requests of all items, in order. Those of item i are `firsts[i]` to `firsts[i + 1]` - 1."""

    tasks: TaskItems
    pairs: tuple[Pair, ...]
    firsts: tuple[int, ...]


def encode_tasks(tasks: TaskItems, tokenizer: Tokenizer) -> EncodedTasks:
    """Encode all items in one batch.

    An option is encoded with its context, and its tokens are those behind the tokens of the context alone, without
    white space at its end. It begins as texts of the tokenizer do. The beginning, or else the end-of-document token,
    stands for a missing context.

    Raises:
        ValueError: a continuation has no token, or the tokenizer has no end-of-document token and an item needs it.
    """
    texts = list[str]()
    for item in tasks.items:
        texts += _texts(item)
    encoded, pairs = iter(tokenizer.encode_texts(texts)), list[tuple[Pair, ...]]()
    for item, place in zip(tasks.items, tasks.places, strict=True):
        context, *wholes = [next(encoded) for _ in _texts(item)]
        found = tuple(_pair(context, whole, tokenizer) for whole in wholes)
        if not all(pair.continuation for pair in found):
            raise ValueError(f"{place}: a continuation has no token of its own; begin it with a space, or lengthen it")
        pairs.append(found)
    return EncodedTasks(tasks, tuple(pairs))


def _texts(item: Item) -> list[str]:
    """Return the context of an item, then the context with each continuation."""
    if isinstance(item, TextItem):
        return ["", item.text]
    return [item.context.rstrip(), *(item.context + text for text in item.texts)]


def _pair(context: list[int], whole: list[int], tokenizer: Tokenizer) -> Pair:
    if context:  # at least the beginning of a text, if the tokenizer has one
        return Pair(context, whole[len(context) :])
    return Pair([tokenizer.eod], whole)


class PackedRequests:
    """The samples that hold the requests: `Samples`, of which there are len().

    Each request is a document of its own. Behind the documents come ids `NO_TOKEN`. A sample with one request has no
    starts of documents: causal attention never sees the ids behind it, and every kernel computes it.
    """

    def __init__(self, requests: TaskRequests, length: int, packs: bool = True) -> None:
        """Place the requests.

        Args:
            length: s.
            packs: several requests share a sample.
        """
        self.requests, self.length, self.packs = requests, length, packs
        lengths = np.array([len(pair.context) + len(pair.continuation) for pair in requests.pairs], np.int64)
        order = np.argsort(-lengths, kind="stable")
        bins = best_fit(lengths[order], length + 1) if packs else np.arange(len(order))
        self._samples: list[list[int]] = [[] for _ in range(int(bins.max(initial=-1)) + 1)]
        for number, sample in zip(order.tolist(), bins.tolist(), strict=True):
            self._samples[sample].append(number)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        ids, starts, at = np.full(self.length + 1, NO_TOKEN), np.empty(self.length + 1, np.int64), 0
        for number in self._samples[index]:
            context, continuation = self.requests.pairs[number]
            stop = at + len(context) + len(continuation)
            ids[at:stop], starts[at:stop] = [*context, *continuation], at
            at = stop
        starts[at:] = at
        return Sample(ids, self.owners(index) != NO_REQUEST, starts[:-1] if self.packs else None)

    def owners(self, index: int) -> Int64s:
        """Return the request to which each target of a sample belongs, [s]; `NO_REQUEST` where none is wanted."""
        found, at = np.full(self.length + 1, NO_REQUEST), 0
        for number in self._samples[index]:
            context, continuation = self.requests.pairs[number]
            at += len(context)
            found[at : at + len(continuation)] = number
            at += len(continuation)
        return found[1:]  # targets follow their inputs
