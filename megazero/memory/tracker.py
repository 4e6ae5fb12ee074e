"""The engine's own account of its memory, by kind, in bytes. Pure: no torch.

A buffer is entered as a `Lease` that lives as long as the buffer does; dropping the lease is the end of its bytes.
Peaks are kept per kind and for the total. Scratch that one kernel takes
and frees is not the engine's, and not in here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

# At rest: parameters, optimizer. Within a step: the others. `host`: memory of the host, not of the device.
KINDS = ("parameters", "optimizer", "gradients", "activation_checkpoints", "buffers", "logits", "host")


class Lease:
    """Bytes of one kind, counted until `end`, or until the last reference to the lease is gone."""

    __slots__ = ("_ledger", "kind", "num_bytes")

    def __init__(self, ledger: Ledger, kind: str, num_bytes: int) -> None:
        self._ledger: Ledger | None = ledger
        self.kind, self.num_bytes = kind, num_bytes
        ledger.enter(kind, num_bytes)

    def end(self) -> None:
        if self._ledger is not None:
            self._ledger.enter(self.kind, -self.num_bytes)
            self._ledger = None

    def __del__(self) -> None:
        self.end()


class Ledger:
    """Current bytes and their peaks.

    Attributes:
        total: bytes on the device now.
        watch: called with a kind whenever its bytes have changed, if set: for traces.
    """

    def __init__(self) -> None:
        self.total = 0
        self.watch: Callable[[str], None] | None = None
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.total_peak = 0

    def lease(self, kind: str, num_bytes: int) -> Lease:
        assert kind in KINDS, kind
        return Lease(self, kind, num_bytes)

    def enter(self, kind: str, num_bytes: int) -> None:
        now = self.now[kind] = self.now[kind] + num_bytes
        self.peak[kind] = max(self.peak[kind], now)
        if kind != "host":
            self.total += num_bytes
            self.total_peak = max(self.total_peak, self.total)
        if self.watch is not None:
            self.watch(kind)

    def begin_iteration(self) -> None:
        """Peaks are an iteration's."""
        self.peak = Counter(self.now)
        self.total_peak = self.total
