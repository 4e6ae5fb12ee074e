"""Made-up tokens with structure to learn, to try a layout without a corpus."""

import math

import numpy as np

from megazero.data.samples import SPLITS, Sample

FOLLOW_BITS = 3  # a token is drawn if these bits of its hash are 0: one of four
FARTHEST = 64  # positions behind a drawn token at which the next one is drawn; none is reached but once in 10^8


class MockSamples:
    """Endless samples of --mock-data: token p of a split's stream is a function of (seed, split, p, `vocab_size`).

    Tokens are divided into levels: level k has the 2^k tokens from 2^k - 1, the last level those that are left. Three
    of four tokens are the neighbour of the token before, in the circle of its level. The others are drawn: each level
    is as likely, and so is each token of a level. So a few tokens are frequent, and most are rare, as in text.

    `samples[i]` is tokens [i s, i s + s] of the stream, for any i >= 0. The loss goes from ln(vocab_size) towards
    `mock_loss_floor`.
    """

    def __init__(self, split_name: str, seq_length: int, seed: int, vocab_size: int) -> None:
        assert split_name in SPLITS and min(seq_length, vocab_size) > 0, (split_name, seq_length, vocab_size)
        self.seq_length, self.vocab_size = seq_length, vocab_size
        self._sizes = np.array(level_sizes(vocab_size), np.int64)
        self._key = _mixed(np.array([seed % 2**64], np.uint64) + np.uint64(SPLITS.index(split_name)))

    def __getitem__(self, index: int) -> Sample:
        assert index >= 0, index
        first = index * self.seq_length
        before = min(first, FARTHEST)
        places = np.arange(first - before, first + self.seq_length + 1, dtype=np.int64)
        drawn = (_mixed(places.astype(np.uint64) ^ self._key) & np.uint64(FOLLOW_BITS)) == 0
        last = np.maximum.accumulate(np.where(drawn, places, -FARTHEST))  # drawn place at or before each
        last = np.where(places - last < FARTHEST, last, places)[before:]
        hashes = _mixed(_mixed(last.astype(np.uint64) ^ self._key))
        level = (hashes % np.uint64(len(self._sizes))).astype(np.int64)
        sizes = self._sizes[level]
        within = (_mixed(hashes) % sizes.astype(np.uint64)).astype(np.int64)
        return Sample((1 << level) - 1 + (within + places[before:] - last) % sizes)


def level_sizes(vocab_size: int) -> list[int]:
    """Return the number of tokens of each level."""
    return [min(1 << k, vocab_size + 1 - (1 << k)) for k in range(vocab_size.bit_length())]


def mock_loss_floor(vocab_size: int) -> float:
    """Return the least loss of --mock-data: the entropy of a token, in nats, given the token before."""
    sizes = level_sizes(vocab_size)
    follows = FOLLOW_BITS / (FOLLOW_BITS + 1)
    each = [(1 - follows) / (len(sizes) * size) for size in sizes]  # probability that a certain token is drawn
    drawn = -sum(size * x * math.log(x) for size, x in zip(sizes, each, strict=True))
    floors = [drawn + x * math.log(x) - (follows + x) * math.log(follows + x) for x in each]
    return sum(floors) / len(floors)


def _mixed(x: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Hash each number with the finalizer of SplitMix64 (Steele, Lea and Flood 2014)."""
    x = (x + np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
