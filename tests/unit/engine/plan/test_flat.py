"""Flat buffers: every small mix of parameters, against a mask of the elements."""

import functools
import itertools

import pytest

from megazero.engine.options.optimizers import ADAMW, MUON, OPTIMIZERS, WeightKind
from megazero.engine.plan.layout.flat_layout import (
    ALIGN,
    FlatLayout,
    FlatParam,
    FlatPiece,
    Matrices,
    Range,
    deal_matrices,
    equal_ranges,
    flat_layout,
    round_up,
    whole_ranges,
)
from tests.helpers.table import for_each

NONE, TP, EP, BOTH = frozenset[str](), frozenset({"tp"}), frozenset({"ep"}), frozenset({"ep", "tp"})
PLACES = ((NONE, NONE), (TP, NONE), (NONE, TP))  # sharded, summed
KINDS = [(decays, *place) for decays in (False, True) for place in PLACES]
# of a unit with experts: (decays, sharded, summed), two axes
MIXED = [
    (d, *place)
    for d in (True, False)
    for place in ((NONE, NONE), (BOTH, NONE), (EP, NONE), (TP, NONE), (EP, TP), (NONE, BOTH))
]
NUMELS = (1, 63, 64, 65, 200)
SIZES = (1, 2, 3, 8)


def mixes() -> list[list[FlatParam]]:
    """Every sequence of up to three kinds, with sizes taken in turn; and one with many of each kind."""
    found: list[list[FlatParam]] = [[]]
    turn = itertools.cycle(NUMELS)
    for n in (1, 2, 3):
        for kinds in itertools.product(KINDS, repeat=n):
            found += [[FlatParam(f"p{i}", next(turn), *kind) for i, kind in enumerate(kinds)] for _ in NUMELS]
    found.append([FlatParam(f"p{i}", 17 * i + 1, *KINDS[i * 7 % 6]) for i in range(23)])
    found.append([FlatParam(f"p{i}", 17 * i + 1, *MIXED[i * 7 % 12]) for i in range(30)])
    return found


@functools.cache
def cases() -> list[tuple[list[FlatParam], int, FlatLayout]]:
    return [(params, size, flat_layout(params, size)) for params in mixes() for size in SIZES]


def elements(r: Range) -> range:
    assert 0 <= r.start <= r.stop
    return range(r.start, r.stop)


def test_windows_and_gaps_tile_the_buffer() -> None:
    for params, size, flat in cases():
        pieces = sorted([*flat.windows.values(), *flat.gaps])
        assert [e for piece in pieces for e in elements(piece)] == list(range(flat.numel)), (params, size)
        assert {name: window.numel for name, window in flat.windows.items()} == {p.name: p.numel for p in params}
        assert all(gap.numel > 0 for gap in flat.gaps)


def test_everything_is_aligned() -> None:
    for params, size, flat in cases():
        assert all(window.start % ALIGN == 0 for window in flat.windows.values())
        assert flat.numel % (ALIGN * size) == 0
        assert flat.numel < sum(round_up(p.numel, ALIGN) for p in params) + ALIGN * size
        ranges = [flat.decayed, *(section.range for section in flat.sections)]
        assert all(edge % ALIGN == 0 for r in ranges for edge in r)


@for_each("axis", ["tp", "ep"])
@for_each("which", ["decayed", "replicated", "sharded", "summed", "summed with sequence parallelism"])
def test_ranges_hold_exactly_the_right_parameters(which: str, axis: str) -> None:
    for params, size, flat in cases():
        chosen = {
            "decayed": [flat.decayed],
            "replicated": flat.replicated(axis),
            "sharded": flat.sharded(axis),
            "summed": flat.summed(axis, False),
            "summed with sequence parallelism": flat.summed(axis, True),
        }[which]
        held = {e for r in chosen for e in elements(r)}
        assert sum(r.numel for r in chosen) == len(held), "ranges overlap"
        for p in params:
            belongs = {
                "decayed": p.decays,
                "sharded": axis in p.sharded,
                "summed": axis in p.summed,
            }.get(which, axis not in p.sharded)
            window = set(elements(flat.windows[p.name]))
            assert window & held == (window if belongs else set()), (params, size, p, flat)


def test_ranges_along_one_axis_are_one_range() -> None:
    """One all-reduce sums over tp, and two pieces of a unit are counted in its norm, for any parameters."""
    for params, _, flat in cases():
        if all(p.sharded | p.summed <= TP for p in params):
            assert max(len(flat.replicated("tp")), len(flat.summed("tp", False))) <= 1
            assert len(flat.sharded("tp")) <= 2


def test_the_order_of_bytes_is_that_of_the_first_checkpoints() -> None:
    """Six groups, written out: gradient norms and the cuts of ZeRO's ranges depend on it."""
    for params, _, flat in cases():
        if all(p.sharded | p.summed <= TP for p in params):
            six = [(True, TP, NONE), (True, NONE, NONE), (True, NONE, TP)]
            six += [(False, sharded, summed) for _, sharded, summed in reversed(six)]
            wanted = [p.name for kind in six for p in params if p[2:5] == kind]
            assert [name for name, _ in sorted(flat.windows.items(), key=lambda item: item[1])] == wanted


def test_decayed_comes_first() -> None:
    assert all(flat.decayed.start == 0 for _, _, flat in cases())


def test_owned_ranges_tile_the_buffer_evenly() -> None:
    for _, size, flat in cases():
        for parts in (n for n in range(1, size + 1) if size % n == 0):
            owned = equal_ranges(flat.numel, parts)
            assert [e for r in owned for e in elements(r)] == list(range(flat.numel))
            assert {r.numel for r in owned} == {flat.numel // parts}


def test_only_the_tail_depends_on_the_ranks() -> None:
    """A parameter has the same offset for every dp, so gradient norms add the same rows."""
    for params in mixes():
        layouts = [flat_layout(params, size) for size in SIZES]
        assert len({tuple(flat.windows.items()) for flat in layouts}) == 1
        assert len({(flat.decayed, *flat.sections) for flat in layouts}) == 1


def test_within_is_the_intersection_from_the_start_of_the_outer_range() -> None:
    ranges = [Range(a, b) for a in range(9) for b in range(a, 9)]
    for inner, outer in itertools.product(ranges, repeat=2):
        found = inner.within(outer)
        expected = [e - outer.start for e in elements(outer) if e in elements(inner)]
        assert list(range(found.start, found.stop)) == expected
        assert found.numel == len(expected)
        assert [*range(outer.start, outer.stop)][found.slice()] == [e + outer.start for e in expected]


def test_owned_asserts_an_even_cut() -> None:
    with pytest.raises(AssertionError):
        equal_ranges(64, 3)


def test_whole_ranges_cut_between_weights_near_equal_ranges() -> None:
    """No weight has two owners; ranges tile the buffer; each end is within a weight of an equal range's."""
    for _, size, flat in cases():
        owned = whole_ranges(flat, size)
        assert [e for r in owned for e in elements(r)] == list(range(flat.numel))
        largest = max((round_up(window.numel, ALIGN) for window in flat.windows.values()), default=0)
        for rank, mine in enumerate(owned):
            assert all(window.within(mine).numel in (0, window.numel) for window in flat.windows.values())
            assert 2 * abs(mine.stop * size - (rank + 1) * flat.numel) <= (largest + ALIGN * size) * size
    flat = flat_layout([FlatParam(f"p{n}", 64 * n, True) for n in (5, 1, 2, 8)], 4)
    assert [*whole_ranges(flat, 4)] == [(0, 320), (320, 512), (512, 512), (512, 1024)]


def test_matrices_are_cut_into_their_pieces() -> None:
    """Pieces are kept if their size is aligned. Matrices precede others with equal axes."""
    norm, router = FlatParam("norm", 100, False), FlatParam("router", 192, True)
    up = FlatParam("up", 6 * 128, True, kind=WeightKind(True), pieces=3, matrices=Matrices(1, 16, 16))
    odd = FlatParam("odd", 4 * 100, True, kind=WeightKind(True), pieces=4, matrices=Matrices(1, 5, 20))
    flat = flat_layout([norm, router, odd, up], 2)
    assert flat.windows == {"odd": (0, 400), "up": (448, 1216), "router": (1216, 1408), "norm": (1408, 1508)}
    assert flat.has_matrices and not flat_layout([norm, router], 2).has_matrices
    each, four = Matrices(1, 16, 16), Matrices(4, 5, 20)
    assert flat.pieces == [(0, four), (448, each), (704, each), (960, each), (1216, None), (1408, None)]
    assert all(isinstance(piece, FlatPiece) for piece in flat.pieces)
    muon, none = OPTIMIZERS["muon"], (0, 0)
    assert flat.by_rule(Range(704, 1472), muon) == [(MUON, (0, 512)), (ADAMW, (512, 768))]
    assert flat.by_rule(Range(1216, 1536), muon) == [(ADAMW, (0, 320)), (MUON, none)]
    assert flat.by_rule(Range(9, 9), muon) == [(MUON, none), (ADAMW, none)]
    assert flat.by_rule(Range(704, 1472), OPTIMIZERS["adamw"]) == [(ADAMW, (0, 768))]
    assert [flat.cost(r) for r in (Range(0, 704), Range(704, 1536))] == [4 * 5 * 5 * 20 + 16**3, 2 * 16**3]


def test_costly_ranges_go_to_the_ranks_with_the_least_cost() -> None:
    """Two units have ranges of cost 5 and 3, and each of two ranks gets one of each. The third rank gets a vector."""
    five, three = Matrices(1, 5, 128), Matrices(1, 3, 128)
    unit = [FlatParam("a", 640, True, pieces=1, matrices=five), FlatParam("b", 384, True, pieces=1, matrices=three)]
    one = flat_layout(unit, 2)
    assert deal_matrices({"x": one, "y": one}, 2) == {"x": ((0, 640), (640, 1024)), "y": ((640, 1024), (0, 640))}
    vector = flat_layout([*unit, FlatParam("c", 512, False)], 3)
    dealt = deal_matrices({"x": vector}, 3)["x"]
    assert dealt == ((0, 640), (640, 1024), (1024, 1536))
    assert [vector.cost(r) for r in dealt] == [5 * 5 * 128, 3 * 3 * 128, 0]


def test_costs_of_all_units_before_are_made_up_for() -> None:
    """Large and small units in turn: no two ranks differ by more than the costliest range."""
    for size in (2, 3, 5):
        flats = {}
        for number in range(12):
            side = 20 if number % 2 else 4
            flats[f"{number}"] = flat_layout(
                [FlatParam("a", 4096, True, pieces=1, matrices=Matrices(1, side, 64))], size
            )
        dealt = deal_matrices(flats, size)
        costs = [sum(flats[name].cost(ranges[rank]) for name, ranges in dealt.items()) for rank in range(size)]
        assert max(costs) - min(costs) <= 20 * 20 * 64, costs


def test_round_up() -> None:
    assert [round_up(n, 64) for n in (0, 1, 63, 64, 65)] == [0, 64, 64, 64, 128]
