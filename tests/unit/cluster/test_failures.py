"""Why a peer is lost: the message of the rank that failed first, or the peers that do not respond."""

from unittest import mock

import pytest
import torch.distributed as dist

from megazero.cluster import failures
from megazero.cluster.failures import explain_lost, report_failure
from megazero.engine.mesh.peer_errors import PeerLost
from megazero.world import World
from tests.helpers.table import for_each

HOSTS = [f"node{rank // 3}" for rank in range(6)]


class Clock:
    """Time that passes in sleeps alone."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def new_store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    found = dist.HashStore()
    monkeypatch.setattr(failures, "default_store", lambda: found)
    monkeypatch.setattr(failures, "time", Clock())
    monkeypatch.setattr(failures, "within", lambda seconds, call: call())
    monkeypatch.setattr(failures, "report_to_launcher", lambda message: None)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    return found


def world(rank: int) -> World:
    return mock.create_autospec(World, instance=True, rank=rank, size=6)


@for_each(
    ("peers", "alive", "said"),
    [
        ((0, 1, 3, 5), (0, 1, 3, 5), ""),
        ((0, 1, 3, 5), (), "ranks 0-1 (node0), 3, 5 (node1) do not respond"),
        ((0, 1, 3, 5), (1, 5), "ranks 0 (node0), 3 (node1) do not respond"),
        ((1, 3), (1,), "rank 3 (node1) does not respond"),
        ((3, 1), (3,), "rank 1 (node0) does not respond"),
        ((2, 4), (), "rank 4 (node1) does not respond"),  # not this rank itself
    ],
)
def test_every_peer_that_is_silent_is_named(
    peers: tuple[int, ...], alive: tuple[int, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = new_store(monkeypatch)
    for rank in alive:
        store.set(f"alive/{rank}", "")
    text = explain_lost(world(2), PeerLost("lost", peers, HOSTS))
    assert text == (f"lost; {said}: frozen, gone or busy elsewhere" if said else "lost")
    assert store.check(["alive/2"])
    later = explain_lost(world(4), PeerLost("later", (2,), HOSTS))
    assert later == f"stopping because another rank failed: rank 2: {text}"


def test_the_first_failure_is_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of a rank that fails, or loses a peer, after it."""
    store = new_store(monkeypatch)
    for rank, message in ((3, "no space"), (1, "killed by 3's end")):
        report_failure(world(rank), message)
    for rank in (0, 5):
        found = explain_lost(world(rank), PeerLost("lost", (1, 3), HOSTS))
        assert found == "stopping because another rank failed: rank 3: no space"
    assert store.check([failures.FAILED_KEY])  # or `get` waits for minutes
    assert store.get(failures.FAILED_KEY).decode() == "rank 3: no space"
