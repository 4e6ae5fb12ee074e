"""Ranks together, without other ranks: limits of time, the groups of each axis, the iterations observed."""

import datetime
import socket
from types import SimpleNamespace

import pytest
import torch

from megazero.cluster import launch
from megazero.engine.memory.tracker import MemoryTracker
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.model.stage import declare
from megazero.engine.plan.layout.topology import Layout
from megazero.flags.cli import parse
from megazero.flags.resolve import resolve
from megazero.observe.profiling import Profiler
from megazero.planner.trace.pretend import pretend_mesh
from megazero.world import World
from tests.helpers.notes import Call, Notes, calls_of
from tests.helpers.table import for_each

pytestmark = pytest.mark.second


CPU = torch.device("cpu")


@for_each(
    ("device", "backend", "minutes", "joining"),
    [(CPU, "gloo", 3.5, 10.0), (torch.device("cuda", 1), "nccl", 25.0, 25.0)],
)
def test_ranks_join_and_part_within_the_limits_given(
    device: torch.device, backend: str, minutes: float, joining: float
) -> None:
    """Starting takes ten minutes at least; a collective has --distributed-timeout-minutes."""
    world, store, delta = World(2, 5, 1, "srun"), object(), datetime.timedelta(minutes=minutes)
    with pytest.MonkeyPatch.context() as patch:
        notes = Notes(patch)
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        notes.of("megazero.cluster.launch:meet", lambda *_: store)
        for name in ("init_process_group", "barrier", "destroy_process_group"):
            notes.of(f"torch.distributed:{name}", lambda *_, **__: None)
        gathered = notes.of("torch.distributed:all_gather_object", lambda hosts, mine, group=None: None)
        notes.of("megazero.cluster.launch:limit")
        notes.of("megazero.cluster.launch:_connect_lazily", lambda _: None)
        assert launch.start(world, device, minutes) == ("",) * 5
        assert [call["obj"] for call in gathered] == [socket.gethostname()]
        patch.setattr(torch.distributed, "is_initialized", lambda: True)
        launch.stop(world, minutes)
    wanted: dict[str, list[Call]] = {
        "meet": [{"world": world, "device": device, "seconds": 60 * joining}],
        "_connect_lazily": [{"num_ranks": 5}],
        "limit": [
            {"world": world, "seconds": 60 * (joining + minutes + 1), "action": "joining the other ranks"},
            {"world": world, "seconds": 60 * (minutes + 1), "action": "leaving the other ranks"},
        ],
    }
    assert {part: calls_of(notes, part) for part in wanted} == wanted
    (group,) = calls_of(notes, "init_process_group")
    given = {"backend": backend, "store": store, "rank": 2, "world_size": 5, "timeout": delta}
    given["device_id"] = device if backend == "nccl" else None
    assert {name: group[name] for name in given} == given
    assert calls_of(notes, "barrier") and calls_of(notes, "destroy_process_group")


def test_a_mesh_makes_its_groups_with_the_time_out_given() -> None:
    """And hands its axes the hosts, the group and the check of buffers in flight."""
    layout, hosts = Layout(pp=2, dp=2, tp=2, shards=1, cp=2), tuple("abcdefghijklmnop")
    with pytest.MonkeyPatch.context() as patch:
        notes = Notes(patch)
        makers = notes.of("megazero.engine.mesh.mesh:GroupMaker")
        named = notes.of(
            "megazero.engine.mesh.groups:GroupMaker.of_axis", lambda self, groups, name, urgent=False: name
        )
        axes = notes.of("megazero.engine.mesh.mesh:Axis")
        patch.setattr(Mesh, "connect", lambda self: None)
        mesh = Mesh.build(layout, 5, CPU, 3.5, check_buffers=False, hosts=hosts)
    assert makers == [{"device": CPU, "timeout": datetime.timedelta(minutes=3.5)}]
    # computation waits for these within a layer: their groups have streams of high priority
    assert {call["name"]: call["urgent"] for call in named} == {
        "tp": True,
        "cp": True,
        "shard": True,
        "pp": False,
        "dp": False,
        "data": False,
        "replica": False,
        "embedding": False,
        "etp": True,
        "ep": True,
        "expert_shard": True,
        "expert_replica": False,
    }
    assert all(call["groups"] == layout.groups(call["name"]) for call in named)
    made = {call["name"]: (call["ranks"], call["group"]) for call in axes if call["hosts"]}
    assert made == {
        "pp": ([5, 13], "pp"),
        "dp": ([1, 5], "dp"),
        "cp": ([5, 7], "cp"),
        "data": ([1, 3, 5, 7], "data"),
        "tp": ([4, 5], "tp"),
        "shard": ([5], "shard"),
        "replica": ([1, 3, 5, 7], "replica"),
        "embedding": ([5, 13], "embedding"),
        "etp": ([4, 5], "etp"),
        "ep": ([5], "ep"),
        "expert_shard": ([5], "expert_shard"),
        "expert_replica": ([1, 3, 5, 7], "expert_replica"),
        "world": ([*range(16)], torch.distributed.group.WORLD),
    }
    assert all(call["rank"] == 5 and call["hosts"] == hosts for call in axes if call["hosts"])
    assert all(call["in_flight"] is mesh.in_flight for call in axes if call["hosts"])
    assert not mesh.in_flight._checks and mesh.host is mesh.world


@for_each(("pp", "bubbles"), [(1, []), (12, [3, 6])])
def test_iterations_are_observed_as_told(pp: int, bubbles: list[int]) -> None:
    """Traced from 2 to 5; slow ranks at every fourth; the bubble, of pipelines alone, with every progress line."""
    flags = (
        "--num-layers 12 --vocab-size 64 --log-interval 3 --straggler-interval 4 --profile-iterations 2:5 --log-dir x"
    )
    config, layout = resolve(parse([*flags.split(), f"--pipeline-model-parallel-size={pp}"]), 2 * pp, 0, declare)
    mesh = pretend_mesh(layout, 1, CPU, True)
    profiler = Profiler(config, SimpleNamespace(mesh=mesh, interpreter=SimpleNamespace(), tracker=MemoryTracker()))
    seen: dict[str, list[int]] = {"traces": [], "measures": [], "compares": []}
    for iteration in range(1, 9):
        profiler.begin(iteration)
        observed = [name for name in seen if getattr(profiler, name)]
        assert (profiler.engine.interpreter.observe is not None) == bool(observed)
        for name in observed:
            seen[name].append(iteration)
    assert seen == {"traces": [2, 3, 4, 5], "measures": bubbles, "compares": [4, 8]}
