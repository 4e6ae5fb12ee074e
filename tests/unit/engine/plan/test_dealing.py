"""dealing.py against counting by hand: every token once, exact shares, exact work, and how even it is."""

import itertools
import random
import time
from collections.abc import Sequence

import numpy as np
import pytest

from megazero.engine.plan.layout.dealing import Deal, deal, deal_samples, imbalance, share
from megazero.planner.imbalance import causal_imbalance
from tests.helpers.table import for_each


def some_documents(length: int, count: int, draws: random.Random) -> list[int]:
    return sorted({0, *(draws.randrange(length) for _ in range(count - 1))})


def some_case(seed: int) -> tuple[int, int, list[int], tuple[int, ...], int, list[int]]:
    """Arguments of deal: lengths from one token per rank, documents of one token, windows, multiples and loads."""
    draws = random.Random(seed)
    ranks, multiple = draws.randrange(1, 14), draws.choice([1, 1, 2, 3, 8])
    length = multiple * draws.choice([ranks, ranks + 1, draws.randrange(ranks, 40 * ranks), 700])
    documents = draws.choice([[], some_documents(length, draws.randrange(1, 30), draws), list(range(length))])
    windows = draws.choice([(0,), (5,), (1, 0, 17), (4000, 3, 3, 0, 0)])
    loads = draws.choice([[], [draws.randrange(length**2) for _ in range(ranks)]])
    return length, ranks, documents, windows, multiple, loads


def counted(length: int, documents: Sequence[int], windows: Sequence[int]) -> np.ndarray:
    """Keys that each query of the sample sees, summed over the layers."""
    at = np.arange(length)
    starts = np.array(documents or [0])
    seen = at - starts[np.searchsorted(starts, at, side="right") - 1] + 1
    return sum(np.minimum(seen, window) if window else seen for window in windows)


@for_each("seed", range(300))
def test_every_token_is_on_one_rank_with_exact_shares_and_work(seed: int) -> None:
    case = some_case(seed)
    length, ranks, documents, windows, multiple, _ = case
    done = deal(*case)
    keys = counted(length, documents, windows)
    tokens = [[token for each in own for token in each] for own in done.ranges]
    assert sorted(itertools.chain(*tokens)) == list(range(length))
    assert [len(own) for own in tokens] == [share(length, ranks, rank, multiple) for rank in range(ranks)]
    assert done.work == tuple(int(keys[own].sum()) for own in tokens)
    for own in done.ranges:
        assert all(each.step == 1 and len(each) for each in own)
        assert all(left.stop < right.start for left, right in itertools.pairwise(own)), "not ascending, or not joined"
    assert done == deal(*case)


def test_shares_are_as_equal_as_multiples_permit() -> None:
    assert [share(11, 4, rank) for rank in range(4)] == [3, 3, 3, 2]
    assert [share(40, 3, rank, multiple=8) for rank in range(3)] == [16, 16, 8]
    assert [share(13, 1, 0)] == [13]


@for_each(("length", "ranks"), [(16, 2), (24, 4), (12, 6), (32768, 8), (32768, 64), (131072, 64)])
def test_one_document_is_dealt_as_heads_and_tails(length: int, ranks: int) -> None:
    """Rank r has the pieces r and 2 ranks - 1 - r, as in other systems; the two in the middle are one range."""
    piece = length // (2 * ranks)
    done = deal(length, ranks)
    for rank in range(ranks - 1):
        tail = 2 * ranks - 1 - rank
        heads_and_tails = (range(rank * piece, (rank + 1) * piece), range(tail * piece, (tail + 1) * piece))
        assert done.ranges[rank] == heads_and_tails
    assert done.ranges[-1] == (range((ranks - 1) * piece, (ranks + 1) * piece),)
    assert causal_imbalance(length, ranks) == imbalance(done.work) == 0


@for_each("ranks", range(2, 65))
def test_one_document_of_any_length_is_even_within_3_percent(ranks: int) -> None:
    draws = random.Random(ranks)
    for length in (32767, 32769, 32768 - ranks + 1, draws.randrange(30000, 34000)):
        assert causal_imbalance(length, ranks) <= 0.005, length
    length = 8 * draws.randrange(4000, 4200)
    assert causal_imbalance(length, ranks, multiple=8) <= 0.03, length


def test_one_rank_has_everything() -> None:
    assert deal(13, 1, [0, 4, 9]) == Deal(ranges=((range(13),),), work=(10 + 15 + 10,))


def test_as_few_pieces_as_the_work_permits() -> None:
    """Pieces are whole shares if all queries see as many keys. A long document is cut more often."""
    whole = [(range(at, at + 1024),) for at in range(0, 4096, 1024)]
    for even in (deal(4096, 4, windows=(8,)), deal(4096, 4, range(0, 4096, 64))):
        assert sorted(even.ranges, key=lambda own: own[0].start) == whole
    long = deal(32768, 8, [*range(0, 24576, 64), 24576])
    assert 3 <= max(map(len, long.ranges)) <= 8
    assert imbalance(long.work) <= 0.01


def test_pieces_are_tiles_at_least() -> None:
    done = deal(8192, 8, range(0, 8192, 500))
    assert min(len(each) for own in done.ranges for each in own) >= 128


@for_each("ranks", [2, 8, 64])
def test_documents_are_even(ranks: int) -> None:
    """From few long ones to hundreds; the pieces of the longest documents are many per rank."""
    draws = random.Random(7)
    for count in (2, 5, 30, 300):
        documents = some_documents(131072, count, draws)
        assert imbalance(deal(131072, ranks, documents).work) <= 0.03, count
        assert imbalance(deal(131064, ranks, documents, multiple=8).work) <= 0.05, count


def test_a_long_document_among_short_ones_is_made_up_for() -> None:
    """In rounds, the rank with its longest piece would have 20 % too much."""
    done = deal(131072, 64, some_documents(131072, 300, random.Random(1)))
    assert imbalance(done.work) < 0.02


def test_work_of_other_samples_is_made_up_for() -> None:
    """Documents that are too few and short to be even alone: the second sample is dealt to the idle ranks."""
    samples = [[0, *range(700, 2048, 64)], [*range(0, 1200, 64), 1200]]
    first, second = deal_samples(2048, 8, samples)
    assert first == deal(2048, 8, samples[0])
    assert second == deal(2048, 8, samples[1], loads=first.work)
    together = imbalance([a + b for a, b in zip(first.work, second.work, strict=True)])
    alone = [
        imbalance([2 * work for work in first.work]),
        imbalance([a + b for a, b in zip(first.work, deal(2048, 8, samples[1]).work, strict=True)]),
    ]
    assert together < min(alone) / 3


def test_work_of_all_samples_before_is_made_up_for() -> None:
    """Not that of the last one alone. In the samples, other ranks are idle."""
    samples = [[0, *range(700, 2048, 64)], [*range(0, 1200, 64), 1200], [0, *range(300, 2048, 64)], [0, 1024]]
    loads = [0] * 8
    for documents, found in zip(samples, deal_samples(2048, 8, samples), strict=True):
        assert found == deal(2048, 8, documents, loads=loads)
        loads = [a + b for a, b in zip(loads, found.work, strict=True)]


def test_imbalance_is_the_share_of_time_that_others_wait() -> None:
    assert imbalance([4, 2, 3]) == pytest.approx(1 / 3)
    assert imbalance([5, 5]) == 0


@for_each(("length", "ranks", "count", "seconds"), [(131072, 64, 900, 0.05), (2**20, 512, 3000, 0.6)])
def test_dealing_is_fast(length: int, ranks: int, count: int, seconds: float) -> None:
    """4 and 50 ms on a quiet core: every rank deals every sample of every micro-batch."""
    documents = some_documents(length, count, random.Random(1))
    start = time.process_time()
    deal(length, ranks, documents)
    assert time.process_time() - start < seconds


@for_each("bad", [(3, 4), (8, 2, [1, 5]), (8, 2, [0, 8]), (9, 2, [], (0,), 2), (8, 3, [], (0,), 4)])
def test_bad_values_are_faults_of_the_caller(bad: tuple) -> None:
    with pytest.raises(AssertionError):
        deal(*bad)
