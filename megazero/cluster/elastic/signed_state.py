"""The agreement of an elastic run's agents in their store. `node_agent` hands it to torchrun's rendezvous.

Note [Clocks]
torchrun's agents write the time of their last sign of life, and each compares the others' times with its own clock:
clocks that differ by more than the limit make nodes lost that are not. Here the store has a number for each node, which
changes with each sign of life. A reader turns it into a time of its own clock: the time at which it saw the number
change, measured in its monotonic clock. The same is true for the moment at which a meeting ends: the store has the
seconds that are left, which each reader counts from when it first sees them.
"""

import itertools
import pickle
import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from megazero.cluster.elastic.secret import Seal
from megazero.cluster.elastic.store_process import NOTHING, STATE


class SignedState(RendezvousBackend):
    """torchrun's state in a store, signed, and without times.

    Pickles of nodes of this run alone are loaded (Note [Strangers]). If the store has another value, the state is the
    last one that this agent has seen, which the next write restores.
    """

    def __init__(
        self, store: dist.Store, seal: Seal, interval: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Prepare the state.

        Args:
            interval: seconds between signs of life of a node; an agent reads at least as often.
            clock: seconds of this process.
        """
        self._store, self._seal, self._clock = store, seal, clock
        self._longest = 2 * interval  # a longer time between two reads was a pause of this process, not of its peers
        self._last: bytes | None = None  # the newest state that a node of this run has written
        self._read_at = clock()
        self._numbers = itertools.count(secrets.randbits(60))  # from a place where no other agent's begin
        self._silent: dict[Any, tuple[int, float]] = {}  # node -> its number, seconds since that changed
        self._ends: tuple[Any, float] = None, 0.0  # the meeting's end as (number, seconds), and by our clock
        self._given: tuple[dict[Any, datetime], datetime | None] = {}, None  # signs of life and end that torchrun has

    @property
    def name(self) -> str:
        return "signed"

    def get_state(self) -> tuple[bytes, bytes] | None:
        return self._received(self._exchange(b"", NOTHING.encode()))  # unlike `get`, it does not wait for the key

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, bytes, bool] | None:
        ours = self._seal.close(STATE, self._without_times(state)).encode()
        expected = token or NOTHING.encode()
        while (found := self._exchange(expected, ours)) != ours:
            if found == expected:
                expected = b""  # a stranger has deleted the key
            elif found == NOTHING.encode() or self._seal.open(STATE, found) is None:
                expected = found
            else:
                break
        received = self._received(found)
        return received and (*received, found == ours)

    def _exchange(self, expected: bytes | str, wanted: bytes | str) -> bytes:
        """Set the state if it is `expected`, or empty if it is missing; return it."""
        try:
            return self._store.compare_set(STATE, expected, wanted)  # type: ignore[arg-type]  # it takes bytes too
        except (ValueError, RuntimeError, TimeoutError) as error:
            raise RendezvousConnectionError("the store is gone") from error

    def _received(self, found: bytes) -> tuple[bytes, bytes] | None:
        """Return a state with times of this clock, and its token: the value of the store."""
        self._last = self._seal.open(STATE, found) or self._last
        return None if self._last is None else (self._with_times(self._last), found)

    def _without_times(self, state: bytes) -> bytes:
        """Return torchrun's state with numbers in place of times. A time that it has changed is a new number."""
        shared, (beats, end) = pickle.loads(state), self._given
        for node, beat in shared.last_heartbeats.items():
            known = beats.get(node) == beat
            shared.last_heartbeats[node] = self._silent[node][0] if known else next(self._numbers)
        if shared.deadline is not None:
            left = (shared.deadline - datetime.now(UTC)).total_seconds()
            shared.deadline = self._ends[0] if shared.deadline == end else (next(self._numbers), left)
        return pickle.dumps(shared)

    def _with_times(self, state: bytes) -> bytes:
        shared, now, wall = pickle.loads(state), self._clock(), datetime.now(UTC)
        passed, self._read_at = min(now - self._read_at, self._longest), now
        before, self._silent = self._silent, {}
        for node, number in shared.last_heartbeats.items():
            known, seconds = before.get(node, (None, 0.0))
            self._silent[node] = number, seconds + passed if number == known else 0.0
            shared.last_heartbeats[node] = wall - timedelta(seconds=self._silent[node][1])
        if shared.deadline is not None:
            if shared.deadline != self._ends[0]:
                self._ends = shared.deadline, now + shared.deadline[1]
            shared.deadline = wall + timedelta(seconds=self._ends[1] - now)
        self._given = dict(shared.last_heartbeats), shared.deadline
        return pickle.dumps(shared)
