"""Samples of several corpora in proportion to weights, always in the same order."""

from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from math import lcm

from megazero.data.samples import Sample, Samples


class BlendedDataset:
    """Samples drawn from several datasets in proportion to weights, always in the same order.

    A closed formula in i gives the dataset of sample i, and the number of the sample in it: there is no table and no
    loop over earlier samples. Megatron loops over the samples and gives each to the dataset that is furthest behind its
    share. For two datasets that rule has the closed form of `_behind_count`. More datasets are the leaves of a binary
    tree, and the rule decides at every fork. After any i samples, a dataset's count differs from i times its share by
    less than the depth of the tree.
    """

    def __init__(
        self,
        datasets: Sequence[Samples],
        weights: Sequence[Fraction | int | float | str],
        origin: int = 0,
        firsts: Sequence[int] = (),
    ) -> None:
        """Blend datasets.

        Args:
            origin: the first sample of the blend.
            firsts: of each dataset, the first sample that the blend takes; empty: 0.
        """
        shares = [Fraction(weight) for weight in weights]
        assert len(shares) == len(datasets) > 0 and min(shares) > 0, weights
        self.datasets, self.origin = tuple(datasets), origin
        self.firsts = tuple(firsts) or (0,) * len(self.datasets)
        scale = lcm(*(share.denominator for share in shares))
        # Running sums of whole weights: exact at any i. Python integers do not overflow.
        self._sums = list(accumulate((int(share * scale) for share in shares), initial=0))

    def locate(self, index: int) -> tuple[int, int]:
        """(number of the dataset, number of the sample in it) of sample `index`."""
        index -= self.origin
        assert index >= 0, (index, self.origin)
        first, stop = 0, len(self.datasets)
        while stop - first > 1:
            middle = self._middle(first, stop)
            left, right = self._sums[middle] - self._sums[first], self._sums[stop] - self._sums[middle]
            before = _behind_count(left, right, index)
            if _behind_count(left, right, index + 1) > before:
                stop, index = middle, before
            else:
                first, index = middle, index - before
        return first, self.firsts[first] + index

    def _middle(self, first: int, stop: int) -> int:
        """Return the index that best divides datasets [first, stop) into equal weights; of equals, the first."""
        sums = self._sums
        both = sums[first] + sums[stop]
        k = bisect_left(sums, both, first + 1, stop - 1, key=lambda each: 2 * each)
        return k - 1 if k > first + 1 and both - 2 * sums[k - 1] <= abs(2 * sums[k] - both) else k

    def counts(self, index: int) -> list[int]:
        """Count the samples of [origin, index) that each dataset serves."""
        counts = [0] * len(self.datasets)
        parts = [(0, len(counts), index - self.origin)]
        while parts:
            first, stop, share = parts.pop()
            if stop - first == 1:
                counts[first] = share
                continue
            middle = self._middle(first, stop)
            left, right = self._sums[middle] - self._sums[first], self._sums[stop] - self._sums[middle]
            before = _behind_count(left, right, share)
            parts += [(first, middle, before), (middle, stop, share - before)]
        return counts

    def __getitem__(self, index: int) -> Sample:
        number, sample = self.locate(index)
        return self.datasets[number][sample]


def _behind_count(left: int, right: int, index: int) -> int:
    """Count the samples of [0, index) that go to the left of two datasets, of weights left and right.

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
