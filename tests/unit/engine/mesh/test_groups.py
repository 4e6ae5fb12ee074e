"""Process groups of large meshes, with stand-ins for torch's calls: how many, and that every rank finds its own."""

import datetime
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megazero.engine.mesh.collectives import Axis
from megazero.engine.mesh.groups import GroupMaker
from megazero.engine.mesh.mesh import Mesh, make_links
from megazero.engine.plan.layout.topology import AXES, SUB_AXES, Layout, disjoint
from megazero.planner.time.devices import communicators
from tests.helpers.table import for_each

MINUTE = datetime.timedelta(minutes=1)


def test_one_rank_needs_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on one GPU: torch.distributed is not started, so every call of it fails."""
    assert not dist.is_initialized()
    on_cpu = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device: on_cpu(*size))  # no GPU is needed for this test
    mesh = Mesh.build(Layout(), 0, torch.device("cuda", 0))
    assert all(axis.size == 1 and axis.group is None for axis in mesh.axes)


def test_disjoint_groups_share_no_rank_and_few_lists_are_enough() -> None:
    for size in range(2, 20):
        ring = [tuple(sorted((i, (i + 1) % size))) for i in range(size if size > 2 else 1)]
        found = disjoint(ring)
        assert sorted(group for groups in found for group in groups) == sorted(ring)
        assert all(len({rank for group in groups for rank in group}) == 2 * len(groups) for groups in found)
        assert len(found) == (1 if size == 2 else 2 + size % 2)


class Splits:
    """Stands in for `dist.split_group` as seen by one rank; records the calls, and names groups as torch 2.13 does."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.calls: list[tuple[list[list[int]], bool]] = []
        self.names: dict[tuple[int, tuple[int, ...]], str] = {}  # (call, ranks) -> name

    def __call__(self, split_ranks: list[list[int]], timeout: Any, pg_options: Any, group_desc: str) -> Any:
        self.calls.append((split_ranks, pg_options == "urgent"))
        ranks = [rank for group in split_ranks for rank in group]
        assert len(ranks) == len(set(ranks)), "a rank has one colour"
        mine = next((group for group in split_ranks if self.rank in group), None)
        if mine is None:
            return None
        self.names[len(self.calls), tuple(mine)] = f"{mine} {len(self.names) + 1}"  # after the world's own
        return "group", *mine, len(self.calls)


@for_each(
    "layout",
    [
        Layout(pp=8, dp=16, tp=8),
        Layout(pp=7, dp=4, tp=2, chunks=3),
        Layout(pp=4, tp=2),
        Layout(pp=8, dp=8, tp=4, shards=4, chunks=2, v_shaped=True),
    ],
)
def test_a_mesh_on_gpus_is_made_in_a_few_splits(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same splits on all ranks, each of disjoint groups, however many ranks there are."""
    seen = set()
    names: dict[tuple[int, tuple[int, ...]], str] = {}
    monkeypatch.setattr(dist, "get_world_size", lambda: layout.world_size)
    for rank in range(layout.world_size) if layout.world_size < 64 else {0, 1, layout.world_size - 1}:
        splits = Splits(rank)
        monkeypatch.setattr(dist, "split_group", splits)
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        monkeypatch.setattr("megazero.engine.mesh.groups._urgent_options", lambda: "urgent")
        maker = GroupMaker(torch.device("cuda", 0), MINUTE)
        for name in (*AXES, *SUB_AXES):
            mine = next((ranks for ranks in layout.groups(name) if rank in ranks), [rank])
            group = maker.of_axis(layout.groups(name), name, urgent=name == "tp")
            assert (group is None) == (len(mine) == 1) and (group is None or list(group[1:-1]) == mine)
        pp = Axis("pp", next(ranks for ranks in layout.groups("pp") if rank in ranks), rank)
        make_links(layout, pp, maker)
        at = pp.rank
        expected = {link for link in layout.links() if at in (link[0], (link[0] + 1) % layout.pp)}
        assert set(pp.links) == expected
        assert len(set(pp.links.values())) == len(expected), "no two links share a communicator"
        for (first, _, _), group in pp.links.items():
            assert set(group[1:-1]) == {pp.ranks[first], pp.ranks[(first + 1) % layout.pp]}
        assert len(splits.calls) <= 6 + 4 * 3
        assert communicators(layout) == 1 + len(splits.names) == 1 + len(splits.calls), "and the world's"
        assert [urgent for _, urgent in splits.calls].count(True) == 1
        seen.add(str(splits.calls))
        for group, name in splits.names.items():
            assert names.setdefault(group, name) == name, "a communicator has two names"
    assert len(seen) == 1


def test_gloos_group_is_made_before_the_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(dist, "new_group", lambda *ranks, backend, timeout: made.append(backend))
    monkeypatch.setattr(dist, "split_group", lambda **flags: made.append(flags["group_desc"]))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr("megazero.engine.mesh.groups._urgent_options", lambda: None)
    monkeypatch.setattr(Mesh, "connect", lambda mesh: None)
    Mesh.build(Layout(dp=2, tp=2), 0, torch.device("cuda", 0))
    assert made == ["gloo", "tp", "shard"]
