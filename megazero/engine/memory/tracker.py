"""The memory tracker: bytes that the engine allocates, by kind. Pure: no torch.

A buffer is registered as an `Allocation`. Its bytes count until the last reference to the allocation is gone. Peaks are
kept per kind and for the total. Scratch memory within a kernel is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

# parameters and optimizer persist between steps. host is memory of the host, nvme files; the others are on the device.
KINDS = ("parameters", "optimizer", "gradients", "activation_checkpoints", "buffers", "logits", "host", "nvme")
ELSEWHERE = ("host", "nvme")


class Allocation:
    """Bytes of one kind, counted until `end`, or until the last reference to the allocation is gone."""

    __slots__ = ("_tracker", "kind", "num_bytes")

    def __init__(self, tracker: MemoryTracker, kind: str, num_bytes: int) -> None:
        self._tracker: MemoryTracker | None = tracker
        self.kind, self.num_bytes = kind, num_bytes
        tracker.enter(kind, num_bytes)

    def end(self) -> None:
        if self._tracker is not None:
            self._tracker.enter(self.kind, -self.num_bytes)
            self._tracker = None

    def __del__(self) -> None:
        self.end()


class MemoryTracker:
    """Current bytes and their peaks.

    Attributes:
        total: bytes on the device now.
        watch: called with a kind whenever its bytes change; traces set it.
    """

    def __init__(self) -> None:
        self.total = 0
        self.watch: Callable[[str], None] | None = None
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.total_peak = 0

    def allocate(self, kind: str, num_bytes: int) -> Allocation:
        assert kind in KINDS, kind
        return Allocation(self, kind, num_bytes)

    def enter(self, kind: str, num_bytes: int) -> None:
        now = self.now[kind] = self.now[kind] + num_bytes
        self.peak[kind] = max(self.peak[kind], now)
        if kind not in ELSEWHERE:
            self.total += num_bytes
            self.total_peak = max(self.total_peak, self.total)
        if self.watch is not None:
            self.watch(kind)

    def begin_iteration(self) -> None:
        """Reset the peaks, which are those of an iteration."""
        self.peak = Counter(self.now)
        self.total_peak = self.total
