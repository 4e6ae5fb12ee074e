"""Communicators of the pipeline's links, made on gloo as they are on NCCL, and connections before the first step."""

import datetime
from collections import Counter
from unittest import mock

import pytest
import torch

from megazero.engine.mesh.collectives import Axis
from megazero.engine.mesh.groups import GroupMaker
from megazero.engine.mesh.mesh import Mesh, make_links
from tests.parallel.cases import Case, Outcome, train, train_on

pytestmark = pytest.mark.second

CPU = torch.device("cpu")


def train_over_links(rank: int, case: Case) -> Outcome:
    mesh = Mesh.build(case.layout, rank, CPU)
    make_links(case.layout, mesh.pp, GroupMaker(CPU, datetime.timedelta(minutes=1)))
    assert mesh.pp.links
    mesh.connect()
    return train_on(mesh, case)


@pytest.mark.parametrize(
    "case",
    [
        Case(pp=2, micro_batches=3),
        Case(pp=3, micro_batches=3, schedule="gpipe"),
        Case(pp=2, micro_batches=4, schedule="interleaved", chunks=2),
        Case(pp=2, micro_batches=4, schedule="zero-bubble-v", chunks=2, recompute="full"),
    ],
    ids=str,
)
def test_links_of_their_own_change_nothing(case: Case, ranks) -> None:
    """Each message finds its receiver over the communicator of its link, in any order of the others."""
    plain, linked = ranks(case.world).run(train, case), ranks(case.world).run(train_over_links, case)
    assert [(o.losses, o.norms, o.sent) for o in linked] == [(o.losses, o.norms, o.sent) for o in plain]


def connections(rank: int, case: Case) -> tuple[Counter[str], dict[str, int]]:
    """Return the communication that building a mesh starts, and the traffic counted after it."""
    started: Counter[str] = Counter()
    start = Axis._start

    def spied(axis: Axis, name: str, *args, **options):
        started[f"{name} over {axis.name}"] += 1
        return start(axis, name, *args, **options)

    with mock.patch.object(Axis, "_start", spied):
        mesh = Mesh.build(case.layout, rank, CPU)
    return started, mesh.sent()


def test_a_mesh_is_connected_before_the_first_step(ranks) -> None:
    """Every axis with peers, and both directions of every link, equal on all ranks; not counted as traffic."""
    case = Case(pp=3, tp=2)
    for rank, (started, sent) in enumerate(ranks(case.world).run(connections, case)):
        stage = case.layout.coord(rank).pp
        both = ["embedding"] if stage != 1 else []
        assert {name for name in started if "all-reduce" in name} == {
            f"all-reduce over {axis}" for axis in ("pp", "tp", "etp", "world", *both)
        }
        links = 1 + (stage == 1)  # with one neighbour, or two
        assert started["send over pp"] == started["receive over pp"] == links
        assert not any(sent.values())
