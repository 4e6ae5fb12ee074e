"""The tokens of a sample that each context-parallel rank computes. Pure: integers only.

A query sees the keys of its document up to its own, or the last `window` of them; the number of these pairs is the work
of attention. A sample is cut into equal pieces, and every rank gets as many of them. All other work of a layer, and all
sizes, depend on the number of tokens only, which is `share` for any documents.

With few pieces, runs of queries are long, which kernels like. With many, documents of any lengths even out. Under a
plain causal mask two pieces per rank are enough: one of the head and one of the tail of the sample.
"""

import heapq
import itertools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from megazero.engine.options.schema import StepConfig
from megazero.engine.plan.layout.topology import Layout

TILE = 128  # tokens of the shortest pieces, unless two pieces per rank are shorter
TOLERANCE = 0.01  # stop cutting below this imbalance


class Deal(NamedTuple):
    """The tokens of a sample by rank.

    Attributes:
        ranges: each rank's tokens, as ascending ranges with gaps between them.
        work: each rank's pairs of a query and a key that it sees, summed over the layers.
    """

    ranges: tuple[tuple[range, ...], ...]
    work: tuple[int, ...]


def share(length: int, ranks: int, rank: int, multiple: int = 1) -> int:
    """Return the tokens of a sample of `length` that `rank` of `ranks` has: a multiple of `multiple`."""
    assert length % multiple == 0, (length, multiple)
    each, more = divmod(length // multiple, ranks)
    return (each + (rank < more)) * multiple


def deal(
    length: int,
    ranks: int,
    documents: Sequence[int] = (),
    windows: Sequence[int] = (0,),
    multiple: int = 1,
    loads: Sequence[int] = (),
) -> Deal:
    """Deal the tokens of a sample to `ranks`, evenly in tokens and nearly so in work.

    Args:
        documents: first tokens of the documents in the sample, ascending from 0; empty: one document.
        windows: of every layer, the number of keys that a query sees at most; 0: no limit.
        multiple: a divisor of `length` and of every rank's tokens.
        loads: work that each rank has of other samples, to be evened out.
    """
    shares = [share(length, ranks, rank, multiple) for rank in range(ranks)]
    assert min(shares) > 0, (length, ranks)
    loads = loads or [0] * ranks
    work = _work(length, documents, windows)
    pieces = 1
    found = [_owners(length, pieces, loads, work)]
    while found[-1][0] > TOLERANCE and (pieces == 1 or 2 * pieces * ranks * TILE <= length):
        pieces *= 2
        found.append(_owners(length, pieces, loads, work))
    _, owners = min(found, key=lambda each: each[0])
    return _cut(owners, shares, multiple, work)


def deal_samples(
    length: int,
    ranks: int,
    samples: Iterable[Sequence[int]],
    windows: Sequence[int] = (0,),
    multiple: int = 1,
) -> list[Deal]:
    """Deal the samples of a micro-batch, given their documents. Later ones even out the work of earlier ones."""
    loads = [0] * ranks
    deals = []
    for documents in samples:
        deals.append(deal(length, ranks, documents, windows=windows, multiple=multiple, loads=loads))
        loads = [sum(each) for each in zip(loads, deals[-1].work, strict=True)]
    return deals


def imbalance(work: Sequence[int]) -> float:
    """Return the largest work over the mean, less one: the share of time for which others wait."""
    return max(work) * len(work) / sum(work) - 1


def _work(length: int, documents: Sequence[int], windows: Sequence[int]) -> Callable[[int], int]:
    """Return the work of the first n tokens, as a function of n."""
    starts = documents or (0,)
    assert starts[0] == 0 and starts[-1] < length, (length, documents)
    layers = Counter(window or length for window in windows).items()

    def of_document(tokens: int) -> int:
        return sum(count * (_triangle(tokens) - _triangle(max(tokens - window, 0))) for window, count in layers)

    sizes = (stop - start for start, stop in itertools.pairwise(starts))
    before = list(itertools.accumulate((of_document(size) for size in sizes), initial=0))

    def of_tokens(tokens: int) -> int:
        last = bisect_right(starts, tokens) - 1
        return before[last] + of_document(tokens - starts[last])

    return of_tokens


def _triangle(n: int) -> int:
    return n * (n + 1) // 2


def _owners(length: int, pieces: int, loads: Sequence[int], work: Callable[[int], int]) -> tuple[float, list[int]]:
    """Return the rank of each of `pieces` equal pieces per rank, in their order in the sample, and the imbalance.

    The piece with the most work goes to the least loaded rank that has room for it. Rounds in which every rank gets
    one piece cannot make up for a long document, because all later rounds together differ by less than the first.
    """
    count = pieces * len(loads)
    totals = [work(length * number // count) for number in range(count + 1)]
    costs = [stop - start for start, stop in itertools.pairwise(totals)]
    owners, room, loads = [0] * count, [pieces] * len(loads), list(loads)
    ranks = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(ranks)
    for number in sorted(range(count), key=lambda number: -costs[number]):
        rank = owners[number] = ranks[0][1]
        loads[rank] += costs[number]
        room[rank] -= 1
        if room[rank]:
            heapq.heapreplace(ranks, (loads[rank], rank))
        else:
            heapq.heappop(ranks)
    return imbalance(loads), owners


def _cut(owners: Sequence[int], shares: Sequence[int], multiple: int, work: Callable[[int], int]) -> Deal:
    """Cut the sample into one piece for each of `owners`, so that every rank has its share to the token.

    A rank's pieces differ by one multiple at most. Each ends as near to the end of an equal piece as that permits.
    """
    length, count = sum(shares), len(owners)
    rest, left = list(shares), [count // len(shares)] * len(shares)
    ranges: list[list[range]] = [[] for _ in shares]
    dealt = [0] * len(shares)
    start = before = 0
    for number, rank in enumerate(owners, 1):
        stop = start + rest[rank] // left[rank] // multiple * multiple
        if (stop - start) * left[rank] < rest[rank] and 2 * (length * number - count * stop) > multiple * count:
            stop += multiple
        rest[rank] -= stop - start
        left[rank] -= 1
        done = work(stop)
        dealt[rank] += done - before
        own = ranges[rank]
        if own and own[-1].stop == start:
            own[-1] = range(own[-1].start, stop)
        elif start < stop:
            own.append(range(start, stop))
        start, before = stop, done
    return Deal(tuple(map(tuple, ranges)), tuple(dealt))


def dealt_multiple(config: StepConfig) -> int:
    """Return the number that divides the tokens of a sample on a context-parallel rank, so that tp can divide T."""
    tp = config.parallel.tensor_model_parallel_size
    return tp // math.gcd(tp, config.training.micro_batch_size) if config.parallel.sequence_parallel else 1


def dealt_tokens(config: StepConfig, layout: Layout, cp_rank: int = 0) -> int:
    """Return the tokens of a sample on a context-parallel rank; the first rank has the most."""
    return share(config.model.seq_length, layout.cp, cp_rank, dealt_multiple(config))


def rank_tokens(config: StepConfig, layout: Layout, cp_rank: int = 0) -> int:
    """Return T, the tokens of a micro-batch on a context-parallel rank; the first rank has the most."""
    return config.training.micro_batch_size * dealt_tokens(config, layout, cp_rank)
