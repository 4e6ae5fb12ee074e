"""The store of an elastic run: a process of its own, which outlives the agents. scripts/elastic_agent.py starts it.

It imports little, because the agents wait for it.
"""

from __future__ import annotations

import sys
import time

import torch.distributed as dist

RUN = "elastic"  # a store is for one run
STATE = f"torch.rendezvous.{RUN}"  # key of the agents' agreement
COMMAND = "megazero/command"  # key of the command of the first node
END = "megazero/end"  # key of the last words of the run
LINGER_SECONDS = 5.0  # in which all agents read them
LEFT_SECONDS = 600.0  # after which a store without agents ends


def keep_store(host: str, port: int) -> None:
    """Be the store until the run has ended, or no agent has given a sign of life for long."""
    try:
        store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False)
    except dist.DistError:
        return  # another one has the port
    state, since = b"", time.monotonic()
    while True:
        time.sleep(1)
        now = store.get(STATE) if store.check([STATE]) else b""
        if now != state:
            state, since = now, time.monotonic()
        if time.monotonic() - since > (LINGER_SECONDS if store.check([END]) else LEFT_SECONDS):
            return


if __name__ == "__main__":
    keep_store(sys.argv[1], int(sys.argv[2]))
