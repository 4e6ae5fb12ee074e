"""`InFlight`: the memory that collectives in flight read or write, and the refusal of whatever overlaps it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch


class OverlapError(AssertionError):
    """Two operations use the same memory at once, and at least one of them writes: a result would depend on timing."""


class Span(NamedTuple):
    """Bytes [start, stop) of the address space."""

    start: int
    stop: int

    def overlaps(self, other: Span) -> bool:
        return self.start < other.stop and other.start < self.stop


def span(x: torch.Tensor) -> Span:
    """The bytes from the first to the last element of `x`; none of an empty or a meta tensor."""
    if x.numel() == 0 or x.device.type == "meta":
        return Span(0, 0)
    elements = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return Span(x.data_ptr(), x.data_ptr() + elements * x.element_size())


class Transfer(NamedTuple):
    """A collective in flight. It holds its tensors, so that their memory is not given to others meanwhile."""

    name: str
    reads: tuple[torch.Tensor, ...]
    writes: tuple[torch.Tensor, ...]


class InFlight:
    """The collectives of one rank that were started and not yet waited for. Owned by a Mesh, shared by its axes.

    Note [buffers in flight]: a backend reads a collective's inputs and writes its outputs at any time between start
    and wait, the rank's own part of an in-place all-gather too (gloo gathers into a buffer of its own, and copies
    all of it back). So an input must not be written, and an output neither read nor written, before the wait. A
    collective that is dropped without a wait stays in flight.
    """

    def __init__(self, checks: bool = True) -> None:
        """`checks` False: nothing is recorded and nothing is refused."""
        self._checks = checks
        self._transfers: dict[int, Transfer] = {}
        self._next = 0

    def add(self, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> int:
        """Record a collective that is about to start; returns the number to `remove`. OverlapError: see `check`."""
        self._next += 1
        if self._checks:
            self._refuse(name, [*map(span, reads)], [*map(span, writes)])
            self._transfers[self._next] = Transfer(name, tuple(reads), tuple(writes))
        return self._next

    def remove(self, number: int) -> None:
        """The collective was waited for."""
        self._transfers.pop(number, None)

    def check(self, action: str, *, reads: Iterable[torch.Tensor] = (), writes: Iterable[torch.Tensor] = ()) -> None:
        """Refuse an action that is no collective: a computation or a copy.

        Raises:
            OverlapError: `action` would read what a collective in flight writes, or write what it reads or writes.
        """
        if self._checks and self._transfers:
            self._refuse(action, [*map(span, reads)], [*map(span, writes)])

    def _refuse(self, action: str, reads: list[Span], writes: list[Span]) -> None:
        for transfer in self._transfers.values():
            for verb, tensors, ours in (("reads", transfer.reads, writes), ("writes", transfer.writes, reads + writes)):
                for x in tensors:
                    theirs = span(x)
                    hit = next((mine for mine in ours if mine.overlaps(theirs)), None)
                    if hit is not None:
                        use = "write" if hit in writes else "read"
                        shared = min(hit.stop, theirs.stop) - max(hit.start, theirs.start)
                        raise OverlapError(
                            f"{action} would {use} {shared} bytes that {transfer.name}, in flight, {verb} "
                            f"(a tensor {list(x.shape)} of {x.dtype}); wait for it first"
                        )
