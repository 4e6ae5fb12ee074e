"""`PeerLost`: what a failed or missing peer looks like from here, with the names of the ranks that it may be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch.distributed as dist

from megazero.units import ranges

# What gloo says when another rank is gone or does not come: plain RuntimeErrors, told by their words alone.
LOST = ("closed by peer", "reset by peer", "broken pipe", "timed out", "timeout", "connection refused", "not connected")
MOST_HOSTS = 4  # in a message


class PeerLost(RuntimeError):
    """Communication failed because another rank is gone or frozen; that rank's message is the one to read.

    Attributes:
        ranks: those that it may be.
        hosts: every rank's host; empty where it is not known.
    """

    def __init__(self, message: str, ranks: Sequence[int] = (), hosts: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.ranks, self.hosts = tuple(ranks), tuple(hosts)


class peer_errors:
    """Around communication with `ranks`: raise PeerLost in place of a backend's error that a peer caused.

    A class, as a generator would cost several times as much around every collective.
    """

    __slots__ = ("action", "hosts", "ranks")

    def __init__(self, action: str, ranks: Sequence[int] = (), hosts: Sequence[str] = ()) -> None:
        """`action`: what failed, such as "all-reduce over dp"; `ranks`: the peers, without this rank."""
        self.action, self.ranks, self.hosts = action, ranks, hosts

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        if error is not None and _caused_by_peer(error):
            whom = ranks_text(self.ranks, self.hosts) if self.ranks else "another rank"
            one_of = "one of " if len(self.ranks) > 1 else ""
            raise PeerLost(f"{self.action}: lost {one_of}{whom}: {error}", self.ranks, self.hosts) from error


def _caused_by_peer(error: BaseException) -> bool:
    """Return true if a failed or missing peer caused the error, and not a mistake of this rank."""
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)):
        return True
    if type(error) is not RuntimeError or error.__cause__ is not None:  # one with a cause is a report, not gloo's
        return False
    return any(words in str(error).lower() for words in LOST)


def ranks_text(ranks: Sequence[int], hosts: Sequence[str] = ()) -> str:
    """Name ranks for a message: "rank 1 (node0)", "ranks 0-3 (node0), 4, 6 (node1)"."""
    by_host = groupby(sorted(ranks), lambda rank: hosts[rank] if hosts else "")
    texts = [_ranges(list(group)) + (f" ({host})" if host else "") for host, group in by_host]
    if len(texts) > MOST_HOSTS:
        texts[MOST_HOSTS:] = [f"and {len(texts) - MOST_HOSTS} more hosts"]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(texts)}"


def _ranges(ranks: list[int]) -> str:
    texts = ranges(ranks)
    return ", ".join(texts if len(texts) <= 16 else [*texts[:16], "..."])
