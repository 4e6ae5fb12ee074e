"""Reports between ranks of why one stops: through the rendezvous store, which may be frozen or gone itself."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

import torch.distributed as dist

from megazero.comm.launch.errors import PeerLost, ranks_text
from megazero.comm.launch.launch import abort, agent_store, within
from megazero.comm.launch.world import World, report_to_launcher
from megazero.log import log

FAILURE_KEY = "failure"  # what the first rank to fail said, or to see a hang, or to lose a peer
ENDED_KEY = "ended"  # what a rank said that failed by itself, and ends
# Launchers name the rank that ends first as the cause. So a rank that lost a peer waits for the cause, this long.
PATIENCE_SECONDS = 3.0
WATCH_SECONDS = 5.0  # between looks for a failure that another rank has reported
STORE_SECONDS = 10.0  # for a few questions to the store
HUNG = 124  # exit code, as that of timeout(1)


def report_failure(world: World, message: str) -> None:
    """Leave this rank's message where the others find it, and where torchrun does. Never raises."""
    report_to_launcher(message)
    if dist.is_initialized():
        try:
            within(STORE_SECONDS, lambda: _publish(f"rank {world.rank}: {message}", ended=True))
        except Exception as error:  # the store goes with the rank that hosts it: then no rank can be told
            log.error(f"cannot tell the other ranks: {error}")


def explain(world: World, lost: PeerLost) -> str:
    """Why a peer is lost: what the rank that failed first said, or else which ranks say nothing.

    Every rank that lost a peer marks itself as alive, so those that do not within a few seconds are frozen, gone, or
    busy with something else.
    """
    if not dist.is_initialized():
        return str(lost)
    host = "torchrun's store" if agent_store() else "rank 0's store"
    try:
        return within(PATIENCE_SECONDS + STORE_SECONDS, lambda: _ask(world, lost))
    except TimeoutError:
        return f"{lost}; {host} does not answer: its process is frozen, or its machine"
    except Exception:
        return f"{lost}; {host} is gone, and with it what the others said: read the output of all ranks"


@contextlib.contextmanager
def ending_with_peers(
    world: World, seconds: float = WATCH_SECONDS, patience: float = PATIENCE_SECONDS
) -> Iterator[None]:
    """Within the block, end this process when another rank has reported that it failed.

    Over NCCL a rank that waits for one that is gone stays in a kernel until the time-out; over gloo the wait itself
    fails. A rank that was killed has reported nothing: launchers end its peers.

    Args:
        seconds: between questions to the store.
        patience: for this rank to fail by itself, with words of its own.
    """
    done = threading.Event()
    store = within(STORE_SECONDS, lambda: _store().clone())  # of its own: the other may be waiting for an answer

    def watch() -> None:
        cause = ""
        while not cause and not done.wait(seconds):
            try:
                if store.check([ENDED_KEY]):
                    cause = store.get(ENDED_KEY).decode()
            except Exception:
                cause = "torchrun is gone" if agent_store() else "rank 0 is gone, and its store with it"
        if not done.wait(patience):
            log.error(f"stopped, for another rank failed: {cause}")
            abort(1)

    threading.Thread(target=watch, name="failed peers", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def end_hung(world: World, place: str, hosts: Sequence[str], patience: float) -> NoReturn:
    """End this rank, which makes no progress: print its stacks, and where all ranks are, and leave with code 124.

    Every rank whose watchdog sees a hang calls it, in a thread. The lowest of them speaks for all.

    Args:
        place: such as "has been in operation 'forward blocks.0 0' for 60 s".
        patience: seconds to wait for the other ranks' watchdogs.
    """
    log.error(f"this process {place}, on {socket.gethostname()}; all its stacks:")
    faulthandler.dump_traceback(all_threads=True)
    try:
        places = within(patience + STORE_SECONDS, lambda: _places(world, place, patience))
    except Exception as error:  # the store hangs with its host, or is gone
        places = {world.rank: place}
        log.error(f"the other ranks cannot be asked: {error}")
    if world.rank == min(places):
        log.error(f"HANG (--hang-timeout): {hang_text(places, world.size, hosts)}")
    abort(HUNG)


def hang_text(places: Mapping[int, str], size: int, hosts: Sequence[str]) -> str:
    """One sentence: where ranks are, those in a place that few are in first; ranks that say nothing last."""
    ranks_in: dict[str, list[int]] = {}
    for rank, place in sorted(places.items()):
        ranks_in.setdefault(place, []).append(rank)
    found = [
        f"{ranks_text(ranks, hosts)} {place}" for place, ranks in sorted(ranks_in.items(), key=lambda p: len(p[1]))
    ]
    silent = [rank for rank in range(size) if rank not in places]
    if silent:
        found.append(f"no word from {ranks_text(silent, hosts)}, which is frozen, gone, or saw progress")
    return "; ".join(found)


def _places(world: World, place: str, patience: float) -> dict[int, str]:
    """Say where this rank is, and collect what the others say."""
    if not dist.is_initialized():
        return {world.rank: place}
    store, places = _store(), {world.rank: place}
    store.set(f"hang/{world.rank}", place)
    _publish(f"rank {world.rank}: {place}")
    deadline = time.monotonic() + patience
    while len(places) < world.size and time.monotonic() < deadline:
        for rank in range(world.size):
            if rank not in places and store.check([f"hang/{rank}"]):
                places[rank] = store.get(f"hang/{rank}").decode()
        time.sleep(0.1)
    store.set(f"hung/{world.rank}", "")
    if world.rank == 0 and not agent_store():  # the store goes with this process: the others read it first
        others = [f"hung/{rank}" for rank in places if rank != world.rank]
        with contextlib.suppress(dist.DistStoreError):
            store.wait(others, datetime.timedelta(seconds=STORE_SECONDS / 2))
    return places


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _publish(message: str, ended: bool = False) -> None:
    for key in (FAILURE_KEY, *[ENDED_KEY] * ended):
        _store().compare_set(key, "", message)  # the first one stays


def _ask(world: World, lost: PeerLost) -> str:
    store = _store()
    store.set(f"alive/{world.rank}", "")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.1)
        if store.check([FAILURE_KEY]):
            time.sleep(max(0.0, deadline - time.monotonic() - 1))
            return f"stopped, for another rank failed: {store.get(FAILURE_KEY).decode()}"
    silent = [rank for rank in lost.ranks if rank != world.rank and not store.check([f"alive/{rank}"])]
    finding = str(lost)
    if silent:
        finding += f"; no word from {ranks_text(silent, lost.hosts)}, which is frozen, gone or busy elsewhere"
    _publish(f"rank {world.rank}: {finding}")
    if world.rank == 0 and not agent_store():
        time.sleep(PATIENCE_SECONDS + 1)  # the store is gone when this process is: others may still ask
    return finding
