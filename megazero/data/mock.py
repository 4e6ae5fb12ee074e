"""Made-up tokens, to try a layout without a corpus."""

from __future__ import annotations

import numpy as np

from megazero.data.samples import SPLITS, Sample


class MockSamples:
    """Endless samples of --mock-data: token p of a split's stream is a hash of (seed, split, p), below `vocab_size`.

    `samples[i]` is tokens [i s, i s + s] of the stream, for any i >= 0. There is nothing to learn: the
    loss goes to ln(vocab_size).
    """

    def __init__(self, split_name: str, seq_length: int, seed: int, vocab_size: int) -> None:
        assert split_name in SPLITS and min(seq_length, vocab_size) > 0, (split_name, seq_length, vocab_size)
        self.seq_length, self.vocab_size = seq_length, vocab_size
        self._key = _mixed(np.array([seed % 2**64], np.uint64) + np.uint64(SPLITS.index(split_name)))

    def __getitem__(self, index: int) -> Sample:
        assert index >= 0, index
        first = index * self.seq_length
        places = np.arange(first, first + self.seq_length + 1, dtype=np.uint64)
        return Sample((_mixed(places ^ self._key) % np.uint64(self.vocab_size)).astype(np.int64))


def _mixed(x: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Hash each number with the finalizer of SplitMix64 (Steele, Lea and Flood 2014)."""
    x = (x + np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
