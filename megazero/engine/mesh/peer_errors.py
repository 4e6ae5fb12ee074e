"""`PeerLost`: the error of a rank whose peer has failed or is missing. It names the peers that may be the cause."""

from collections.abc import Sequence
from itertools import groupby

import torch.distributed as dist

from megazero.units import ranges

# gloo reports a lost peer as a plain RuntimeError; it is recognised by its text alone.
LOST = ("closed by peer", "reset by peer", "broken pipe", "timed out", "timeout", "connection refused", "not connected")
MOST_HOSTS, MOST_RANGES = 4, 16  # in a message; ranges per host


class PeerLost(RuntimeError):
    """Communication failed because another rank is gone or frozen; the cause is in that rank's message.

    Attributes:
        ranks: the ranks that may be the lost one.
        hosts: every rank's host; empty if unknown.
    """

    def __init__(self, message: str, ranks: Sequence[int] = (), hosts: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.ranks, self.hosts = tuple(ranks), tuple(hosts)


class peer_errors:
    """Context of communication with `ranks`: raises PeerLost in place of a backend's error that a peer caused.

    A class, because a generator would cost several times as much around every collective.
    """

    __slots__ = ("action", "hosts", "ranks")

    def __init__(self, action: str, ranks: Sequence[int] = (), hosts: Sequence[str] = ()) -> None:
        """`action`: name for the message, such as "all-reduce over dp"; `ranks`: the peers, without this rank."""
        self.action, self.ranks, self.hosts = action, ranks, hosts

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        if error is not None and _caused_by_peer(error):
            peers = ranks_text(self.ranks, self.hosts) if self.ranks else "another rank"
            one_of = "one of " if len(self.ranks) > 1 else ""
            raise PeerLost(f"{self.action}: lost {one_of}{peers}: {error}", self.ranks, self.hosts) from error


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
    texts = [_few(ranges(group)) + (f" ({host})" if host else "") for host, group in by_host]
    if len(texts) > MOST_HOSTS:
        texts[MOST_HOSTS:] = [f"and {len(texts) - MOST_HOSTS} more hosts"]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(texts)}"


def _few(texts: list[str]) -> str:
    return ", ".join(texts[:MOST_RANGES]) + (", ..." if len(texts) > MOST_RANGES else "")
