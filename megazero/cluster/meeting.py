"""The ranks of a run meet at a key-value store.

Note [Meeting]
torchrun's store outlives the ranks: after a failure, it has entries of processes that are gone. No number distinguishes
two starts of the ranks, because torchrun counts the restarts of each node separately. So each process writes a random
*token* at its seat. Rank 0 invites the token at each seat, and an invited process replies; one that is gone does not.
When the tokens at all seats have replied, the ranks have met. Keys of this meeting begin with rank 0's token.
"""

import datetime
import errno
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

import torch
import torch.distributed as dist

from megazero.cluster.listening import LOOPBACK, host_store
from megazero.engine.mesh.peer_errors import PeerLost, ranks_text
from megazero.world import World, agent_store, number, one_node

ANSWER_SECONDS = 30.0  # until torchrun's store answers; the store of rank 0 may start later
FIRST_PAUSE, LAST_PAUSE = 0.005, 0.25  # seconds between questions to the store

T = TypeVar("T")


def meet(world: World, device: torch.device, seconds: float) -> dist.Store:
    """Return a store for the ranks of this run, when all have joined.

    Raises:
        ValueError: the port is taken, its store belongs to another run, or a node lacks its GPUs.
        PeerLost: some ranks have not joined after `seconds`.
    """
    store = _open_store(world, seconds)
    if not agent_store():  # a new one: ranks of another run are refused at once
        _take_seat(store, world, device)
    store = _gather(store, world, seconds)
    if agent_store():
        _take_seat(store, world, device)
    return store


def within(seconds: float, function: Callable[[], T]) -> T:
    """Return function(), computed in another thread. After `seconds`: TimeoutError; the thread keeps running."""
    outcome: Future[T] = Future()

    def compute() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=compute, daemon=True).start()
    return outcome.result(timeout=seconds)


def _open_store(world: World, seconds: float) -> dist.Store:
    """Connect to the store, and start it on rank 0 if torchrun has not, at a loopback address if there is one node."""
    host, port = os.environ["MASTER_ADDR"], number("MASTER_PORT")
    server, is_server = "torchrun" if agent_store() else "rank 0", world.rank == 0 and not agent_store()
    where = LOOPBACK if one_node(world) and not agent_store() else host
    patience = ANSWER_SECONDS if agent_store() else seconds  # torchrun listens before it starts its ranks
    timeout = datetime.timedelta(seconds=patience)

    def connect() -> dist.Store:
        store = (host_store if is_server else dist.TCPStore)(where, port, wait_for_workers=False, timeout=timeout)
        store.set_timeout(datetime.timedelta(seconds=seconds))
        return store

    try:
        store = within(patience + ANSWER_SECONDS, connect)
    except (dist.DistNetworkError, dist.DistStoreError, OSError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise ValueError(
                f"MASTER_PORT={port} is taken on this machine, perhaps by another run; export another port before the "
                f"ranks are started, or end the process that uses it (see `ss -ltnp 'sport = :{port}'`)"
            ) from None
        raise PeerLost(
            f"{server} does not answer at MASTER_ADDR={host}, MASTER_PORT={port} ({error}): was it started, can this "
            "machine reach it, or does another program use that port?"
        ) from None
    return dist.PrefixStore("megazero", store)


def _take_seat(store: dist.Store, world: World, device: torch.device) -> None:
    """Refuse the store of another run, and a rank that has joined already.

    Raises:
        ValueError: naming MASTER_PORT, or the rank.
    """
    where = f"MASTER_ADDR={os.environ['MASTER_ADDR']}, MASTER_PORT={os.environ['MASTER_PORT']}"
    job = os.environ.get("SLURM_JOB_ID")
    ours = f"{world.size} ranks on {device.type}" + (f" of SLURM job {job}" if job else "")
    theirs = store.compare_set("run", "", ours).decode()
    if theirs != ours:
        raise ValueError(
            f"rank {world.rank} on {socket.gethostname()} is one of {ours}, but the ranks at {where} are {theirs}: "
            "another run uses that port (export another before the ranks are started), or a node lacks its GPUs"
        )
    if store.add(f"seat/{world.rank}", 1) > 1:
        raise ValueError(
            f"rank {world.rank} has already joined at {where}: another run uses that port, or two processes have "
            f"RANK={world.rank}; export another port before the ranks are started"
        )


def _gather(store: dist.Store, world: World, seconds: float) -> dist.Store:
    """Wait for all ranks, as in Note [Meeting]. Returns the store of this meeting."""
    token = uuid.uuid4().hex
    store.set(f"token/{world.rank}", token)
    for _ in _pauses(seconds):
        host = _invite(store, world, token) if world.rank == 0 else _reply(store, token)
        if host:
            return dist.PrefixStore(host, store)
    missing = _missing(store, world, token)
    raise PeerLost(f"{len(missing)} of {world.size} ranks did not start within {seconds:g} s: {ranks_text(missing)}")


def _invite(store: dist.Store, world: World, token: str) -> str:
    """Invite all that have a seat; return `token` if all have replied."""
    seats = [f"token/{rank}" for rank in range(1, world.size)]
    if not store.check(seats):
        return ""
    guests = [guest.decode() for guest in store.multi_get(seats)]
    replies = [f"{token}/{guest}" for guest in guests]
    if store.check(replies):
        store.set(f"{token}/met", "")
        return token
    for guest in guests:
        store.set(f"invited/{guest}", token)
    return ""


def _reply(store: dist.Store, token: str) -> str:
    """Reply to the invitation of `token`; return the token of rank 0 if all have replied."""
    if not store.check([f"invited/{token}"]):
        return ""
    host = store.get(f"invited/{token}").decode()
    store.set(f"{host}/{token}", "")
    return host if store.check([f"{host}/met"]) else ""


def _missing(store: dist.Store, world: World, token: str) -> list[int]:
    """Return the ranks that did not start, as far as this rank knows."""
    absent, host = [rank for rank in range(world.size) if not store.check([f"token/{rank}"])], token
    if absent:
        return absent
    if world.rank:
        if not store.check([f"invited/{token}"]):
            return [0]
        host = store.get(f"invited/{token}").decode()
    guests = {rank: store.get(f"token/{rank}").decode() for rank in range(1, world.size)}
    return [rank for rank, guest in guests.items() if not store.check([f"{host}/{guest}"])]


def _pauses(seconds: float) -> Iterator[None]:
    """Yield until `seconds` have passed, with longer and longer pauses."""
    until, pause = time.monotonic() + seconds, FIRST_PAUSE
    while time.monotonic() < until:
        yield
        time.sleep(pause)
        pause = min(1.5 * pause, LAST_PAUSE)
