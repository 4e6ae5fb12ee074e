"""The store of an elastic run: clocks that differ, strangers that write, the secret. Agents are real, time is not."""

from __future__ import annotations

import base64
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from megazero.cluster import agent_notes as notes

LOST, BEAT, LAST_CALL = 8, 2, 20.0
FOREVER = 1e9


class Cluster:
    """Agents in one process and thread, each with a wall clock of its own. Their monotonic clocks agree."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from megazero.cluster.elastic import node_agent, signed_state

        self.seconds, self.ahead, self.store = 1000.0, 0.0, dist.HashStore()
        self.agents, self.state = node_agent, signed_state
        cluster = self

        class Wall(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> datetime:
                return datetime.fromtimestamp(1e9 + cluster.seconds + cluster.ahead, tz)

        for module in (dynamic_rendezvous, signed_state):
            monkeypatch.setattr(module, "datetime", Wall)
        monkeypatch.setattr(dynamic_rendezvous, "time", SimpleNamespace(monotonic=lambda: self.seconds))

    def node(self, name: str, most: int, ahead: Callable[[float], float] = lambda seconds: 0.0) -> Node:
        seal = self.agents.Seal("secret")
        state = self.state.SignedState(self.store, seal, BEAT, lambda: self.seconds)
        limits = self.agents.RendezvousTimeout(
            join=timedelta(seconds=FOREVER), last_call=timedelta(seconds=LAST_CALL), heartbeat=timedelta(seconds=60)
        )
        beats = {"keep_alive_interval": BEAT, "keep_alive_max_attempt": LOST // BEAT}
        return Node(
            self, self.agents.Meeting.from_backend("elastic", self.store, state, 1, most, name, limits, **beats), ahead
        )


class Node:
    """An agent. `steps` joins a meeting, one look at the store at a time."""

    def __init__(self, cluster: Cluster, meeting: Any, ahead: Callable[[float], float]) -> None:
        self.cluster, self.meeting, self.ahead, self.joined = cluster, meeting, ahead, False

    @contextmanager
    def clock(self) -> Iterator[None]:
        self.cluster.ahead = self.ahead(self.cluster.seconds - 1000.0)
        yield

    def look(self) -> list[str]:
        """Read the state, and give a sign of life if it is due: the nodes of this generation, as this one knows."""
        join = dynamic_rendezvous._RendezvousJoinOp()
        with self.clock():
            if self.joined:
                self.meeting._keep_alive()
                self.meeting.is_closed()  # reads
            else:
                try:
                    self.meeting._op_executor.run(join, FOREVER)
                    self.joined = True
                except Waiting:
                    pass
        return sorted(node.addr for node in self.meeting.state.participants)


class Waiting(Exception):
    pass


def wait(seconds: float) -> None:
    raise Waiting


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setattr(dynamic_rendezvous, "_delay", wait)
    monkeypatch.setattr(dynamic_rendezvous, "get_method_name", lambda depth=2: "")  # slow; only for events
    return Cluster(monkeypatch)


CLOCKS: dict[str, Callable[[float], float]] = {
    "equal": lambda at: 0.0,
    "12 s ahead": lambda at: 12.0,
    "12 s behind": lambda at: -12.0,
    "a minute ahead": lambda at: 60.0,
    "a day behind": lambda at: -86400.0,
    "a jump ahead": lambda at: 3600.0 * (at > 30),
    "a jump back": lambda at: -3600.0 * (at > 30),
    "fast": lambda at: at / 8,
    "slow": lambda at: at / -8,
}


def test_no_clock_makes_a_node_a_lost_one(cluster: Cluster) -> None:
    """Two nodes meet after LAST_CALL, stay together, and one that ends is lost after LOST seconds, neither sooner."""
    for case, ahead in CLOCKS.items():
        cluster.seconds, cluster.store = 1000.0, dist.HashStore()
        nodes = {"a": cluster.node("a", 3), "b": cluster.node("b", 3, ahead)}
        seen: dict[str, list[list[str]]] = {"a": [], "b": []}
        met = None
        for second in range(60):
            cluster.seconds += 1
            for name, node in nodes.items():
                if name == "a" or second >= 2:  # b comes later
                    seen[name].append(node.look())
            if met is None and all(node.joined for node in nodes.values()):
                met = second
        assert met is not None and LAST_CALL <= met <= LAST_CALL + 2, (case, met)
        for name in nodes:
            assert all(each == ["a", "b"] for each in seen[name][5:]), (case, name, seen[name])
        gone = next(passed for passed in range(1, 60) if _later(cluster, 1.0, nodes["a"]) == ["a"])
        assert LOST <= gone <= LOST + BEAT + 1, (case, gone)


def _later(cluster: Cluster, seconds: float, node: Node) -> list[str]:
    cluster.seconds += seconds
    return node.look()


def test_a_pause_of_the_reader_is_not_that_of_its_peers(cluster: Cluster) -> None:
    a, b = cluster.node("a", 2), cluster.node("b", 2)
    for node in (a, b, a):
        _later(cluster, 1.0, node)
    assert a.joined and b.joined
    for _ in range(3):
        assert _later(cluster, 300.0, b) == ["a", "b"]  # all were paused, and this one is the first to run again
        assert a.look() == ["a", "b"]


# -- strangers

DONE: list[str] = []


class Evil:
    """Unpickling it calls `ran`."""

    def __reduce__(self) -> Any:
        return ran, ()


def ran() -> str:
    DONE.append("ran")
    return "ran"


def test_values_of_strangers_are_neither_unpickled_nor_believed(cluster: Cluster) -> None:
    """They are replaced by the last state that the agents knew; also before the first one, and after a deletion."""
    DONE.clear()
    key, evil = cluster.state.STATE, pickle.dumps(Evil())
    seal, other = cluster.agents.Seal("secret"), cluster.agents.Seal("of another run")
    values = [
        base64.b64encode(evil).decode(),
        evil.decode("latin-1"),
        other.close(key, evil),
        f"{'0' * 64} {base64.b64encode(evil).decode()}",
        seal.close(cluster.agents.END, evil),  # signed, for another key
        "",
        None,
    ]
    pickle.loads(evil)
    assert DONE.pop() == "ran"
    for value in values:

        def disturb(value: str | None = value) -> None:
            cluster.store.delete_key(key) if value is None else cluster.store.set(key, value)

        cluster.store = dist.HashStore()
        disturb()
        a, b = cluster.node("a", 2), cluster.node("b", 2)
        disturb()
        for node in (a, b, a):
            _later(cluster, 1.0, node)
        for node in (a, b, b, a):
            disturb()
            assert _later(cluster, BEAT, node) == ["a", "b"], value
            assert seal.read(cluster.store, key) is not None, value
    assert not DONE


def test_the_end_of_a_run_is_signed(cluster: Cluster) -> None:
    a, end = cluster.node("a", 1), cluster.agents.END
    a.meeting.store, a.meeting.seal = cluster.store, cluster.agents.Seal("secret")
    cluster.store.set(end, "0 the run is done")
    assert cluster.agents.last_words(cluster.store, a.meeting.seal) is None
    a.meeting.end("a fault", 3)
    a.meeting.end("another one", 4)
    found = cluster.agents.last_words(cluster.store, a.meeting.seal)
    assert (str(found), found.code) == ("a fault", 3)


def test_the_secret_is_the_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megazero.cluster.elastic import secret

    monkeypatch.delenv("ELASTIC_SECRET", raising=False)
    save = tmp_path / "runs" / "s"
    first = secret.shared_secret(str(save))
    path = save / "elastic.key"
    assert len(first) == 64 and secret.shared_secret(str(save)) == first and path.stat().st_mode & 0o777 == 0o600
    assert secret.shared_secret(str(tmp_path / "t")) != first
    with pytest.raises(ValueError, match=r"--elastic needs --save DIR, .* or ELASTIC_SECRET in the environment"):
        secret.shared_secret("")
    monkeypatch.setattr(secret, "READ_SECONDS", 0.0)
    path.write_text(first[:9])
    with pytest.raises(ValueError, match=r"elastic.key has 9 of 64 characters; delete it, and start all nodes again"):
        secret.shared_secret(str(save))

    def readable() -> None:
        path.write_text(first)
        path.chmod(0o644)

    def fifo() -> None:
        os.mkfifo(path, 0o600)

    def link() -> None:
        (tmp_path / "theirs").write_text(first)
        path.symlink_to(tmp_path / "theirs")

    for make in (readable, fifo, link):
        path.unlink()
        make()
        with pytest.raises((ValueError, OSError)) as refused:
            secret.shared_secret(str(save))
        assert "elastic.key" in str(refused.value)
    monkeypatch.setenv("ELASTIC_SECRET", "given")
    assert secret.shared_secret(str(save)) == "given"


def test_an_agent_passes_over_what_is_not_its_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A FIFO would hang it, and a link would lead it elsewhere. Folders of agents that were killed are deleted."""
    monkeypatch.setattr(notes.tempfile, "tempdir", str(tmp_path))
    os.mkfifo(tmp_path / "megazero-agent-fifo")
    (tmp_path / "kept").mkdir()
    (tmp_path / "megazero-agent-link").symlink_to(tmp_path / "kept")
    (tmp_path / "megazero-agent-file").touch()
    (tmp_path / "megazero-agent-left").mkdir()
    (tmp_path / "megazero-agent-foreign").mkdir()
    real, foreign = os.fstat, (tmp_path / "megazero-agent-foreign").stat().st_ino

    def owner(file: int) -> os.stat_result:
        found = real(file)
        return os.stat_result((*found[:4], found.st_uid + (found.st_ino == foreign), *found[5:]))

    monkeypatch.setattr(notes.os, "fstat", owner)
    made = notes.make_folder()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["kept", made.name, *(f"megazero-agent-{name}" for name in ("fifo", "link", "file", "foreign"))]
    )


@pytest.mark.parametrize(
    ("joined", "left", "seconds"),
    [(2, {5: 2}, 5), (2, {5: 1, 25: 1}, 25), (2, {5: 1}, 32), (0, {}, 32)],
    ids=["all have left", "a slow node", "a lost node", "none has joined"],
)
def test_the_store_waits_for_nodes_that_have_not_read_the_last_words(
    joined: int, left: dict[int, int], seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """left: second -> nodes that leave then. The run ends in the second second."""
    from megazero.cluster.elastic import store_process as process

    store, seal, now = dist.HashStore(), process.Seal("secret"), 0

    def sleep(_: float) -> None:
        nonlocal now
        now += 1
        if now == 1:
            store.add(process.JOINED, joined)
            store.compare_set(process.STATE, process.NOTHING, "all")
        if now == 2:
            store.set(process.END, seal.close(process.END, b"0 done"))
        store.add(process.LEFT, left.get(now, 0))

    monkeypatch.setattr(process, "host_store", lambda *_: store)
    monkeypatch.setattr(process, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now))
    process.keep_store("localhost", 0, seal)
    assert now == seconds


def test_a_generation_that_has_lost_a_node_at_its_start_meets_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun counts nodes after the agreement, and one may be lost in between."""
    node = Cluster(monkeypatch).node("a", 2).meeting
    worlds = [1, 1, 2]
    monkeypatch.setattr(node, "_settings", replace(node.settings, min_nodes=2))
    node.endpoint = "localhost", 1
    monkeypatch.setattr(
        dynamic_rendezvous.DynamicRendezvousHandler,
        "next_rendezvous",
        lambda self: SimpleNamespace(store=dist.HashStore(), rank=0, world_size=worlds.pop(0)),
    )
    assert node.next_rendezvous().world_size == 2 and not worlds
