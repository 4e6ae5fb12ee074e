"""A set of the documents seen before: exact, by 16-byte hashes, in 16 bytes of memory per document."""

import numpy as np
import numpy.typing as npt

Digests = npt.NDArray[np.uint64]


class Seen:
    """A set of 128-bit hashes, uint64 [n, 2], kept in sorted runs of falling size.

    A run is merged with the one before it when it has grown to half of that one: n documents are moved
    O(log n) times, and memory is 16 bytes a document (up to three times that during a merge).
    """

    def __init__(self) -> None:
        self._runs: list[Digests] = []

    def __len__(self) -> int:
        return sum(len(run) for run in self._runs)

    def add(self, digests: Digests) -> npt.NDArray[np.bool_]:
        """Add hashes; true where one is new, the first of equal ones among them."""
        order = np.lexsort((digests[:, 1], digests[:, 0]))  # stable: of equal ones, the first comes first
        ordered = digests[order]
        new = np.ones(len(digests), dtype=bool)
        new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
        for run in self._runs:
            new &= ~_contains(run, ordered)
        fresh = np.empty(len(digests), dtype=bool)
        fresh[order] = new
        self._insert(ordered[new])
        return fresh

    def _insert(self, run: Digests) -> None:
        if len(run):
            self._runs.append(run)
        while len(self._runs) > 1 and 2 * len(self._runs[-1]) >= len(self._runs[-2]):
            last, before = self._runs.pop(), self._runs.pop()
            both = np.concatenate([before, last])
            self._runs.append(both[np.lexsort((both[:, 1], both[:, 0]))])


def _contains(run: Digests, sought: Digests) -> npt.NDArray[np.bool_]:
    """Return, for each of `sought`, if it is in a sorted run."""
    at = np.searchsorted(run[:, 0], sought[:, 0])
    found = np.zeros(len(sought), dtype=bool)
    open_ = np.arange(len(sought))
    while len(open_):  # once, but for hashes that share their first 64 bits
        inside = open_[at[open_] < len(run)]
        here = run[at[inside]]
        same_first = here[:, 0] == sought[inside, 0]
        equal = same_first & (here[:, 1] == sought[inside, 1])
        found[inside[equal]] = True
        open_ = inside[same_first & ~equal]
        at[open_] += 1
    return found
