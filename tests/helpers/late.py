"""A backend that finishes as late as allowed, for tests of waits.

A collective may read its inputs, and write its outputs, at any time between start and wait; a fast machine hides that
a wait is missing. Here inputs are read at the start, outputs hold NaN until the wait, and results come newest
first: one that was not waited for overwrites a newer one. All of it is deterministic: no thread, no sleep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megazero.engine.mesh.collectives import Axis


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit: NaN equals itself."""
    first, second = (x.contiguous().view(-1).view(torch.uint8) for x in (one, other))
    return torch.equal(first, second)


def copy(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)


class LateWork:
    """A collective that reads its inputs when it is started, and is issued when any of the rank's is waited for."""

    def __init__(
        self,
        backend: LateBackend,
        group: Any,
        collective: Callable[[], Any],
        reads: tuple[torch.Tensor, ...],
        writes: tuple[torch.Tensor, ...],
    ) -> None:
        self.backend, self.group, self.collective = backend, group, collective
        self.reads = [x.detach() for x in reads]
        self.writes = [x.detach() for x in writes]
        self.issued: Any = None
        self.inputs = [x.clone() for x in self.reads]
        for out in self.writes:
            if out.is_floating_point():
                out.fill_(torch.nan)
        copy(self.inputs, self.reads)  # of an in-place collective, input and output overlap
        self.outputs = [x.clone() for x in self.writes]

    def issue(self) -> None:
        if self.issued is None:
            if self.backend.checks:
                for x, was in zip(self.reads + self.writes, self.inputs + self.outputs, strict=True):
                    assert same(x, was), f"a tensor {list(x.shape)} was written while a collective on it was in flight"
            self.overwritten = [x.clone() for x in self.reads]
            copy(self.inputs, self.reads)
            with torch.no_grad():
                self.issued = self.collective()

    def complete(self) -> list[torch.Tensor]:
        """The results, which are not in `writes` yet."""
        self.issued.wait()
        results = [out.clone() for out in self.writes]
        copy(self.overwritten, self.reads)
        return results

    def wait(self) -> None:
        self.backend.finish(self)


class LateBackend:
    """The collectives of one rank that are not done, in the order of their start."""

    def __init__(self, checks: bool) -> None:
        self.checks = checks
        self.waiting: list[LateWork] = []

    def launch(
        self,
        axis: Axis,
        collective: Callable[[], Any],
        reads: tuple[torch.Tensor, ...] = (),
        writes: tuple[torch.Tensor, ...] = (),
    ) -> LateWork:
        work = LateWork(self, axis.group, collective, reads, writes)
        self.waiting.append(work)
        return work

    def finish(self, wanted: LateWork) -> None:
        """Issue everything, in order, as peers may wait for it. Finish the collectives of `wanted`'s group up to it."""
        if wanted not in self.waiting:
            return  # finished with a later one of its group
        for work in self.waiting:
            work.issue()
        done = [work for work in self.waiting[: self.waiting.index(wanted) + 1] if work.group is wanted.group]
        results = [work.complete() for work in done]
        for work, values in zip(reversed(done), reversed(results), strict=True):
            copy(values, work.writes)
            self.waiting.remove(work)


@contextmanager
def late_collectives(checks: bool = True) -> Iterator[None]:
    """Make every Axis' collectives late. `checks`: refuse also a tensor that anything wrote in flight."""
    backend, launch = LateBackend(checks), Axis._launch
    Axis._launch = lambda axis, *args, **kwargs: backend.launch(axis, *args, **kwargs)
    try:
        yield
        while backend.waiting:
            backend.finish(backend.waiting[-1])
    finally:
        Axis._launch = launch
