"""Flat buffers: every small mix of parameters, against a mask of the elements."""

from __future__ import annotations

import itertools

import pytest

from megazero.plan.flat_layout import ALIGN, FlatLayout, FlatParam, Range, flat_layout, round_up

PLACES = ((False, False), (True, False), (False, True))  # sharded, partial
KINDS = [(decays, *place) for decays in (False, True) for place in PLACES]
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
    return found


CASES = [(params, size, flat_layout(params, size)) for params in mixes() for size in SIZES]


def elements(r: Range) -> range:
    assert 0 <= r.start <= r.stop
    return range(r.start, r.stop)


def test_windows_and_gaps_tile_the_buffer() -> None:
    for params, size, flat in CASES:
        pieces = sorted([*flat.windows.values(), *flat.gaps])
        assert [e for piece in pieces for e in elements(piece)] == list(range(flat.numel)), (params, size)
        assert {name: window.numel for name, window in flat.windows.items()} == {p.name: p.numel for p in params}
        assert all(gap.numel > 0 for gap in flat.gaps)


def test_everything_is_aligned() -> None:
    for params, size, flat in CASES:
        assert all(window.start % ALIGN == 0 for window in flat.windows.values())
        assert flat.numel % (ALIGN * size) == 0
        assert flat.numel < sum(round_up(p.numel, ALIGN) for p in params) + ALIGN * size
        assert all(edge % ALIGN == 0 for r in (flat.decayed, flat.replicated, flat.partial) for edge in r)


@pytest.mark.parametrize("which", ["decayed", "replicated", "partial"])
def test_ranges_hold_exactly_the_right_parameters(which: str) -> None:
    for params, size, flat in CASES:
        chosen = getattr(flat, which)
        for p in params:
            belongs = {"decayed": p.decays, "replicated": not p.sharded, "partial": p.kind == "partial"}[which]
            window = flat.windows[p.name]
            inside = set(elements(window)) & set(elements(chosen))
            assert inside == (set(elements(window)) if belongs else set()), (params, size, p, flat)


def test_decayed_comes_first() -> None:
    assert all(flat.decayed.start == 0 for _, _, flat in CASES)


def test_owned_ranges_tile_the_buffer_evenly() -> None:
    for _, size, flat in CASES:
        for parts in (n for n in range(1, size + 1) if size % n == 0):
            owned = [flat.owned(rank, parts) for rank in range(parts)]
            assert [e for r in owned for e in elements(r)] == list(range(flat.numel))
            assert {r.numel for r in owned} == {flat.numel // parts}


def test_only_the_tail_depends_on_the_ranks() -> None:
    """A parameter starts where it starts, whatever dp is: so gradient norms add the same rows."""
    for params in mixes():
        layouts = [flat_layout(params, size) for size in SIZES]
        assert len({tuple(flat.windows.items()) for flat in layouts}) == 1
        assert len({(flat.decayed, flat.replicated, flat.partial) for flat in layouts}) == 1


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
        FlatLayout({}, [], Range(0, 0), Range(0, 0), Range(0, 0), 64).owned(0, 3)


def test_round_up() -> None:
    assert [round_up(n, 64) for n in (0, 1, 63, 64, 65)] == [0, 64, 64, 64, 128]
