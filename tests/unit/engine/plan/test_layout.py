"""The rank grid, over every small layout."""

import itertools

from megazero.engine.plan.layout.topology import AXES, SUB_AXES, Coord, Layout, ring_bytes
from megazero.flags.batch_ramp import data_parallel_size
from megazero.planner.layouts import layout_words, rank_layers, rank_places, stage_copies
from tests.helpers.table import for_each

LAYOUTS = [Layout(*sizes, cp=cp) for *sizes, cp in itertools.product((1, 2, 3, 4), repeat=4)]


def test_ranks_and_coordinates_are_one_to_one() -> None:
    for layout in LAYOUTS:
        coords = [layout.coord(rank) for rank in range(layout.world_size)]
        assert sorted(coords) == coords == [Coord(*c) for c in itertools.product(*map(range, _sizes(layout)))]
        assert [layout.rank(coord) for coord in coords] == list(range(layout.world_size))


def _sizes(layout: Layout) -> tuple[int, ...]:
    return layout.pp, layout.dp, layout.cp, layout.tp


def test_tensor_parallel_neighbours_are_adjacent_ranks() -> None:
    assert Layout(pp=2, dp=2, tp=2).groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert Layout(pp=2, dp=2, tp=2).groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert Layout(pp=2, dp=2, tp=2).groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_context_parallel_ranks_are_between_data_and_tensor() -> None:
    layout = Layout(dp=2, cp=3, tp=2, shards=3)
    assert layout.groups("cp") == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]
    assert layout.groups("dp") == [[0, 6], [1, 7], [2, 8], [3, 9], [4, 10], [5, 11]]
    assert layout.groups("data") == [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]]
    assert layout.groups("shard") == layout.groups("cp") and layout.groups("replica") == layout.groups("dp")
    dense = {"pp": 1, "dp": 2, "cp": 3, "tp": 2, "data": 6, "shard": 3, "replica": 2}
    assert layout.sizes == dense | {"etp": 2, "ep": 1, "expert_shard": 3, "expert_replica": 2}
    places = {"pp": 0, "dp": 1, "cp": 1, "tp": 1, "data": 4, "shard": 1, "replica": 1}
    assert rank_places(layout, 9) == places | {"etp": 1, "ep": 0, "expert_shard": 1, "expert_replica": 1}


def test_experts_are_divided_over_all_ranks_of_a_stage() -> None:
    """Two stages of 12 ranks: four parts of the experts, whole ones, over neighbours of any axis; three copies."""
    layout = Layout(pp=2, dp=3, cp=2, tp=2, ep=4, expert_tp=1)
    assert layout.groups("ep")[:3] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert layout.groups("expert_shard")[:4] == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]
    assert layout.groups("etp") == layout.groups("expert_replica") == [[rank] for rank in range(24)]
    halves = Layout(dp=4, tp=2, ep=2, shards=2)  # each expert on two ranks; ZeRO within two replicas
    assert halves.groups("etp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert halves.groups("ep") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert (halves.expert_shard, halves.groups("expert_replica")) == (1, [[0, 4], [1, 5], [2, 6], [3, 7]])
    assert rank_places(halves, 5) == {"pp": 0, "dp": 2, "cp": 0, "tp": 1, "data": 2, "shard": 0} | {
        "replica": 1,
        "etp": 1,
        "ep": 0,
        "expert_shard": 0,
        "expert_replica": 1,
    }


@for_each("axis", AXES)
def test_groups_partition_the_world(axis: str) -> None:
    """In a group one coordinate runs from 0 up, and the others stay."""
    for layout in LAYOUTS:
        groups = layout.groups(axis)
        assert sorted(itertools.chain(*groups)) == list(range(layout.world_size))
        for group in groups:
            coords = [layout.coord(rank) for rank in group]
            assert [getattr(c, axis) for c in coords] == list(range(getattr(layout, axis)))
            assert len({c._replace(**{axis: 0}) for c in coords}) == 1


def test_strides_and_ranges_are_those_of_the_groups() -> None:
    sharded = [
        Layout(pp, 6 // cp, tp, shards, cp=cp)
        for pp, tp, shards, cp in itertools.product((1, 2), (1, 2), (2, 3), (1, 2, 3))
    ]
    for layout in [*LAYOUTS, *sharded]:
        for axis in (*AXES, *SUB_AXES):
            for group in layout.groups(axis):
                assert {b - a for a, b in itertools.pairwise(group)} <= {layout.stride(axis)}
        for rank, coord in ((rank, layout.coord(rank)) for rank in range(layout.world_size)):
            data = rank_places(layout, rank)["data"]
            assert rank in layout.stage_ranks(coord.pp) and rank in stage_copies(layout, coord.pp)[data]
            [group] = [group for group in layout.groups("shard") if rank in group]
            assert group.index(rank) == data % layout.shard
        stages = [layout.stage_ranks(pp) for pp in range(layout.pp)]
        assert list(itertools.chain(*stages)) == list(range(layout.world_size))
        assert data_parallel_size(layout.world_size, layout.pp, layout.tp, layout.cp) == layout.dp


def test_ends_join_the_first_and_the_last_stage() -> None:
    for layout in LAYOUTS:
        groups = layout.groups("embedding")
        assert len(groups) == layout.data * layout.tp
        for group in groups:
            coords = [layout.coord(rank) for rank in group]
            assert [c.pp for c in coords] == ([0] if layout.pp == 1 else [0, layout.pp - 1])
            assert len({c._replace(pp=0) for c in coords}) == 1


def test_layers_are_cut_in_order_and_evenly() -> None:
    for pp in range(1, 9):
        for num_layers in range(pp, 30):
            stages = [rank_layers(Layout(pp=pp), num_layers, stage) for stage in range(pp)]
            assert list(itertools.chain(*stages)) == list(range(num_layers))
            sizes = [len(stage) for stage in stages]
            assert sizes == sorted(sizes, reverse=True) and max(sizes) - min(sizes) <= 1


def test_ring_bytes() -> None:
    assert [ring_bytes(120, size) for size in (1, 2, 3, 4)] == [0, 60, 80, 90]
    assert [ring_bytes(120, size, passes=2) for size in (1, 2, 3, 4)] == [0, 120, 160, 180]


def test_it_is_shown_as_it_is_asked_for() -> None:
    assert layout_words(Layout(pp=2, dp=3, tp=4)) == "pp 2 x dp 3 x tp 4"
    assert layout_words(Layout(pp=2, dp=3, tp=4, cp=5, shards=5)) == "pp 2 x dp 3 x cp 5 (3 x 5) x tp 4"
