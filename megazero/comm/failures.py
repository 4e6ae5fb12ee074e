"""Reports between ranks of why one stops: through the rendezvous store, which may be frozen or gone itself."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

from megazero.comm.errors import PeerLost, ranks_text
from megazero.comm.launch import World, agent_store, within

FAILURE_KEY = "failure"  # what the first rank to fail said
# Launchers name the rank that ends first as the cause. So a rank that lost a peer waits for the cause, this long.
PATIENCE_SECONDS = 3.0
STORE_SECONDS = 10.0  # for a few questions to the store


def report_failure(world: World, message: str) -> None:
    """Leave this rank's message where the others find it, and where torchrun does. Never raises."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")  # what is in there is in torchrun's last words
    if path:
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
    if dist.is_initialized():
        try:
            within(STORE_SECONDS, lambda: _tell(f"rank {world.rank}: {message}"))
        except Exception as error:  # the store goes with the rank that hosts it: then no rank can be told
            print(f"rank {world.rank}: could not tell the others: {error}", file=sys.stderr, flush=True)


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


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _tell(message: str) -> None:
    _store().compare_set(FAILURE_KEY, "", message)  # the first one stays


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
    _tell(f"rank {world.rank}: {finding}")
    if world.rank == 0 and not agent_store():
        time.sleep(PATIENCE_SECONDS + 1)  # the store is gone when this process is: others may still ask
    return finding
