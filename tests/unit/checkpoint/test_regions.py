"""regions.py against a mask: every small shape, every range, every way to spoil a tiling."""

import itertools
import random
import time
from math import prod

import numpy as np
import pytest

from megazero.checkpoint.regions import Region, coverage_fault, regions, split
from tests.helpers.table import for_each

SHAPES = [shape for num_dims in range(4) for shape in itertools.product((1, 2, 3, 4), repeat=num_dims)] + [
    (2, 3, 2, 3),
    (1, 2, 1, 4),
]


def counts(shape: tuple[int, ...], pieces: list[Region]) -> np.ndarray:
    """Count how often each element of the tensor is held."""
    mask = np.zeros(shape, dtype=np.int64)
    for piece in pieces:
        mask[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.size, strict=True))] += 1
    return mask


def elements(shape: tuple[int, ...], piece: Region) -> list[int]:
    """Flat indices of the elements, in the row-major order of the piece."""
    flat = np.arange(prod(shape)).reshape(shape)
    return flat[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.size, strict=True))].flatten().tolist()


@for_each("shape", SHAPES)
def test_a_flat_range_is_few_regions_in_flat_order(shape: tuple[int, ...]) -> None:
    for start, stop in itertools.combinations_with_replacement(range(prod(shape) + 1), 2):
        pieces = regions(shape, start, stop)
        found = [element for piece in pieces for element in elements(shape, piece)]
        assert found == list(range(start, stop)), (start, stop, pieces)
        assert len(pieces) <= max(1, 2 * len(shape) - 1)
        assert start < stop or not pieces


def test_the_bound_is_reached() -> None:
    assert len(regions((4, 4), 1, 15)) == 3
    assert len(regions((4, 4, 4), 1, 63)) == 5


@for_each("bounds", [(-1, 2), (3, 2), (0, 7)])
def test_a_range_outside_the_tensor_is_refused(bounds: tuple[int, int]) -> None:
    with pytest.raises(AssertionError):
        regions((2, 3), *bounds)


@for_each("limit", [1, 2, 3, 5, 7, 100])
def test_split_keeps_order_and_limit(limit: int) -> None:
    for shape in SHAPES:
        whole = Region((0,) * len(shape), shape)
        pieces = split(whole, limit)
        assert [e for piece in pieces for e in elements(shape, piece)] == list(range(prod(shape)))
        assert all(piece.volume <= limit for piece in pieces)
    inside = split(Region((3, 1), (4, 5)), limit)
    assert [e for piece in inside for e in elements((9, 9), piece)] == elements((9, 9), Region((3, 1), (4, 5)))


def test_coverage_agrees_with_a_mask_on_every_set_of_regions() -> None:
    """All multisets of up to three regions of all tensors of up to 2x3 elements, and of a 2x2x2 sample."""
    random_source = random.Random(0)
    for shape in [(), (3,), (2, 2), (2, 3), (2, 2, 2)]:
        spans = [[(a, b - a) for a, b in itertools.combinations(range(n + 1), 2)] for n in shape]
        every = [
            Region(tuple(o for o, _ in choice), tuple(n for _, n in choice)) for choice in itertools.product(*spans)
        ]
        sets = [list(s) for k in range(4) for s in itertools.combinations_with_replacement(every, k)]
        if len(sets) > 3000:
            sets = random_source.sample(sets, 3000)
        sets.append([Region(index, (1,) * len(shape)) for index in np.ndindex(*shape)])
        verdicts = set()
        for pieces in sets:
            mask = counts(shape, pieces)
            fault = coverage_fault(shape, pieces)
            assert (fault is None) == bool((mask == 1).all()), (shape, pieces, fault)
            verdicts.add(fault is None)
        assert verdicts == {True, False}


def test_the_fault_named_is_a_real_one() -> None:
    whole = Region((0, 0), (4, 6))
    assert coverage_fault((4, 6), [whole]) is None
    assert coverage_fault((4, 6), []) == "elements [0:4, 0:6] are missing"
    assert coverage_fault((4, 6), regions((4, 6), 0, 15)) == "elements [2:3, 3:6] are missing"
    assert coverage_fault((4, 6), [whole, Region((1, 2), (1, 1))]) == "elements [1:2, 2:3] are given 2 times"
    assert coverage_fault((), []) == "elements [] are missing"
    outside = coverage_fault((4, 6), [Region((0, 0), (4, 7))])
    assert outside is not None and "[0:4, 0:7] is outside the shape (4, 6)" in outside
    wrong_dims = coverage_fault((4, 6), [Region((0,), (24,))])
    assert wrong_dims is not None and "outside" in wrong_dims


def test_equal_volume_does_not_hide_a_hole() -> None:
    """A hole and an overlap of the same size: the sum of volumes alone would accept it."""
    pieces = [Region((0,), (4,)), Region((3,), (3,)), Region((7,), (1,))]
    assert sum(piece.volume for piece in pieces) == 8
    assert coverage_fault((8,), pieces) == "elements [3:4] are given 2 times"


def test_thousands_of_pieces_take_no_time() -> None:
    """A matrix cut into 8 column blocks, each of them into 500 unaligned flat ranges."""
    pieces = []
    for block in range(8):
        local = (4001, 129)
        cuts = [i * prod(local) // 500 for i in range(501)]
        for start, stop in itertools.pairwise(cuts):
            pieces += [piece.moved((0, 129 * block)) for piece in regions(local, start, stop)]
    assert len(pieces) > 8000
    began = time.process_time()
    assert coverage_fault((4001, 8 * 129), pieces) is None
    assert coverage_fault((4001, 8 * 129), pieces[:-1]) is not None
    assert time.process_time() - began < 5.0
