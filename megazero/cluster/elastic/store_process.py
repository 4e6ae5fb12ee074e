"""The store of an elastic run: a process of its own, which outlives the agents. `node_agent` starts it.

It imports little, because the agents wait for it.
"""

import os
import sys
import time

from megazero.cluster.elastic.secret import VARIABLE, Seal
from megazero.cluster.listening import host_store

RUN = "elastic"  # a store is for one run
STATE = f"torch.rendezvous.{RUN}"  # key of the agents' agreement
NOTHING = "nothing"  # its value before the first agreement
COMMAND = "megazero/command"  # key of the command of the first node
END = "megazero/end"  # key of the last words of the run
SILENCE = "megazero/silence"  # key of the seconds since the agreement last changed: each sign of life changes it
JOINED, LEFT = "megazero/joined", "megazero/left"  # keys of the numbers of agents that have joined, and then left
LINGER_SECONDS = 30.0  # after the last words, for agents that have not left: they may be slow, or lost
LEFT_SECONDS = 600.0  # after which a store without agents ends


def keep_store(host: str, port: int, seal: Seal) -> None:
    """Be the store until the run has ended, or no agent has given a sign of life for long."""
    try:
        store = host_store(host, port)
    except OSError:
        return  # another one has the port
    state, since = b"", time.monotonic()
    while True:
        time.sleep(1)
        now = store.compare_set(STATE, "", NOTHING)  # unlike `get`, it does not wait for the key
        if now != state:
            state, since = now, time.monotonic()
        silence = time.monotonic() - since
        store.set(SILENCE, seal.close(SILENCE, str(silence).encode()))
        ended = seal.read(store, END) is not None
        if silence > (LINGER_SECONDS if ended else LEFT_SECONDS):
            return
        if ended and 0 < store.add(JOINED, 0) <= store.add(LEFT, 0):
            return


if __name__ == "__main__":
    keep_store(sys.argv[1], int(sys.argv[2]), Seal(os.environ[VARIABLE]))
