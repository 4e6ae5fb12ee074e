"""Reports between ranks of why one stops: through the rendezvous store, which may itself be frozen or gone."""

import contextlib
import datetime
import faulthandler
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

import torch.distributed as dist

from megazero.cluster.launch import exit_now
from megazero.cluster.meeting import within
from megazero.engine.mesh.peer_errors import PeerLost, ranks_text
from megazero.log import log
from megazero.torch_private import default_store
from megazero.world import World, agent_store, report_to_launcher

CAUSE_KEY = "failure"  # message of the first rank that failed, hung or lost a peer
FAILED_KEY = "ended"  # message of the first rank that failed by itself
# Launchers report the rank that ends first as the cause. So a rank that lost a peer waits for the cause, this long.
PATIENCE_SECONDS = 3.0
WATCH_SECONDS = 5.0  # between looks for a failure that another rank has reported
STORE_SECONDS = 10.0  # for a few questions to the store
HUNG = 124  # exit code, as that of timeout(1)


def report_failure(world: World, message: str) -> None:
    """Leave this rank's message for the other ranks and for torchrun. Never raises."""
    report_to_launcher(message)
    if dist.is_initialized():
        try:
            within(STORE_SECONDS, lambda: _leave(f"rank {world.rank}: {message}", CAUSE_KEY, FAILED_KEY))
        except Exception as error:  # the store ends with the rank that hosts it
            log.error(f"cannot reach the other ranks: {error}")


def explain_lost(world: World, lost: PeerLost) -> str:
    """Return why a peer is lost: the message of the rank that failed first, or else the ranks that do not respond.

    Every rank that lost a peer marks itself as alive. A rank that does not, within a few seconds, is frozen, gone, or
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
        return f"{lost}; {host} is gone; the cause is in the output of another rank"


@contextlib.contextmanager
def ending_with_peers(
    world: World, seconds: float = WATCH_SECONDS, patience: float = PATIENCE_SECONDS
) -> Iterator[None]:
    """Within the block, end this process when another rank has reported a failure.

    Over NCCL a rank that waits for a missing peer stays in a kernel until the time-out; over gloo the wait itself
    fails. A rank that was killed has reported nothing: launchers end its peers.

    Args:
        seconds: between questions to the store.
        patience: time for this rank to fail by itself, with a message of its own.
    """
    done = threading.Event()
    # A connection of its own: the other may be blocked.
    store = within(STORE_SECONDS, lambda: default_store().clone())  # type: ignore[attr-defined]

    def watch() -> None:
        cause = ""
        while not cause and not done.wait(seconds):
            try:
                if store.check([FAILED_KEY]):
                    cause = store.get(FAILED_KEY).decode()
            except Exception:
                cause = "torchrun is gone" if agent_store() else "rank 0 is gone, and its store with it"
        if not done.wait(patience):
            log.error(_stopping(cause))
            exit_now(1)

    threading.Thread(target=watch, name="failed peers", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def end_hung(world: World, place: str, hosts: Sequence[str], patience: float) -> NoReturn:
    """End this rank, which makes no progress, with exit code 124. Prints its stacks and the places of all ranks.

    Each rank whose watchdog detects a hang calls it, in a thread. The lowest of them prints the places.

    Args:
        place: such as "has been in operation 'forward blocks.0 0' for 60 s".
        patience: seconds to wait for the other ranks' watchdogs.
    """
    log.error(f"this process {place}, on {socket.gethostname()}; all its stacks:")
    faulthandler.dump_traceback(all_threads=True)
    places = {world.rank: place}
    if dist.is_initialized():
        try:
            places = within(patience + STORE_SECONDS, lambda: _places(world, place, patience))
        except Exception as error:  # the store is frozen or gone, with its host
            log.error(f"the other ranks cannot be asked: {error}")
    if world.rank == min(places):
        log.error(f"HANG (--hang-timeout): {hang_text(places, world.size, hosts)}")
    exit_now(HUNG)


def hang_text(places: Mapping[int, str], size: int, hosts: Sequence[str]) -> str:
    """Return one sentence: the places of the ranks, those with the fewest ranks first; silent ranks last."""
    ranks_in: dict[str, list[int]] = {}
    for rank, place in sorted(places.items()):
        ranks_in.setdefault(place, []).append(rank)
    rarest_first = sorted(ranks_in.items(), key=lambda item: len(item[1]))
    found = [f"{ranks_text(ranks, hosts)} {place}" for place, ranks in rarest_first]
    silent = [rank for rank in range(size) if rank not in places]
    if silent:
        found.append(_silent(silent, hosts, "frozen, gone, or making progress"))
    return "; ".join(found)


def _places(world: World, place: str, patience: float) -> dict[int, str]:
    """Leave this rank's place in the store, and collect those of the other ranks."""
    store, places = default_store(), {world.rank: place}
    store.set(f"hang/{world.rank}", place)
    _leave(f"rank {world.rank}: {place}", CAUSE_KEY)
    deadline = time.monotonic() + patience
    while len(places) < world.size and time.monotonic() < deadline:
        for rank in range(world.size):
            if rank not in places and store.check([f"hang/{rank}"]):
                places[rank] = store.get(f"hang/{rank}").decode()
        time.sleep(0.1)
    store.set(f"hung/{world.rank}", "")
    if world.rank == 0 and not agent_store():  # the store ends with this process: let the others read it first
        others = [f"hung/{rank}" for rank in places if rank != world.rank]
        with contextlib.suppress(dist.DistStoreError):
            store.wait(others, datetime.timedelta(seconds=STORE_SECONDS / 2))
    return places


def _ask(world: World, lost: PeerLost) -> str:
    store = default_store()
    store.set(f"alive/{world.rank}", "")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.1)
        if store.check([CAUSE_KEY]):
            time.sleep(max(0.0, deadline - time.monotonic() - 1))
            return _stopping(store.get(CAUSE_KEY).decode())
    silent = [rank for rank in lost.ranks if rank != world.rank and not store.check([f"alive/{rank}"])]
    finding = str(lost)
    if silent:
        finding += f"; {_silent(silent, lost.hosts, 'frozen, gone or busy elsewhere')}"
    _leave(f"rank {world.rank}: {finding}", CAUSE_KEY)
    if world.rank == 0 and not agent_store():
        time.sleep(PATIENCE_SECONDS + 1)  # the store ends with this process: others may still ask
    return finding


def _leave(message: str, *keys: str) -> None:
    for key in keys:
        default_store().compare_set(key, "", message)  # the first one stays


def _stopping(cause: str) -> str:
    return f"stopping because another rank failed: {cause}"


def _silent(ranks: Sequence[int], hosts: Sequence[str], states: str) -> str:
    return f"{ranks_text(ranks, hosts)} {'does' if len(ranks) == 1 else 'do'} not respond: {states}"
