"""CUDA graphs of the pretended GPU: a capture writes operators down, a replay carries them out again.

As on a GPU, an operator is written down with the addresses and the numbers that it has in the capture, and nothing is
computed then: memory keeps its values, and memory that the capture itself takes is NaN. It comes from a pool that
graphs share, in which a tensor that is freed gives its memory to the next one, also of a later capture. A replay reads
and writes the same memory again, with the values of that moment. So a wrong address or a frozen number gives wrong
results; an address whose tensor is gone is a finding, as is every operation that CUDA forbids in a capture.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.helpers.pretended_gpu.findings import CAPTURE
from tests.helpers.pretended_gpu.memory import Place, tensors_in
from tests.helpers.pretended_gpu.streams import Stream

if TYPE_CHECKING:
    from tests.helpers.pretended_gpu.modes import Session

POISON = 0xFF  # a byte: floating-point numbers of it are NaN
Run = Callable[..., Any]


class Region:
    """A piece of a pool's memory. Tensors have it one after the other, each from its beginning."""

    def __init__(self, session: Session, num_bytes: int) -> None:
        self.whole = torch.full((num_bytes,), POISON, dtype=torch.uint8)  # aligned as all tensors are
        self.memory = self.whole.numpy()
        session.memory.put(self.whole, Place.DEVICE, session.streams.current.line)


class Pool:
    """Memory of the graphs that share it."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self.free: list[Region] = []

    def take(self, session: Session, like: torch.Tensor) -> tuple[torch.Tensor, Region]:
        """Return a tensor like another one, in memory of the pool."""
        num_bytes = like.untyped_storage().nbytes()
        fits = [region for region in self.free if len(region.memory) >= num_bytes]
        if fits:
            region = min(fits, key=lambda each: len(each.memory))
            self.free.remove(region)
        else:
            region = Region(session, num_bytes)
            self.regions.append(region)
        storage = torch.from_numpy(region.memory[:num_bytes]).untyped_storage()  # another storage, in the same memory
        session.memory.share(storage, region.whole, functools.partial(self.free.append, region))
        layout = like.storage_offset(), like.shape, like.stride()
        return torch.empty(0, dtype=like.dtype).set_(storage, *layout), region


@dataclass(frozen=True)
class Address:
    """A tensor as a kernel has it: where its memory is, and how it is read."""

    storage: weakref.ref[torch.UntypedStorage]
    dtype: torch.dtype
    layout: tuple[int, torch.Size, tuple[int, ...]]

    def tensor(self) -> torch.Tensor | None:
        storage = self.storage()
        return None if storage is None else torch.empty(0, dtype=self.dtype).set_(storage, *self.layout)


class Step(NamedTuple):
    """An operator of a capture.

    Attributes:
        arguments: positional ones, and by name, with an `Address` for every tensor of the device.
        results: per tensor that it returns, where it goes; None: it is one of the arguments.
    """

    name: str
    run: Run
    arguments: tuple[Any, Any]
    reads: list[Address]
    writes: list[Address]
    results: list[Address | None]


class Graph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    def __init__(self, session: Session) -> None:
        self._session, self.steps, self.pool = session, list[Step](), Pool()

    def replay(self) -> None:
        """Carry out the operators, on the current stream."""
        with self._session.pausing():
            for step in self.steps:
                self._carry_out(step)

    def _carry_out(self, step: Step) -> None:
        session = self._session
        reads, writes = ([address.tensor() for address in given] for given in (step.reads, step.writes))
        if any(x is None for x in (*reads, *writes)):
            what = f"{session.operator(step.name)} is replayed, and the memory of a tensor that it was given is freed"
            session.findings.report(CAPTURE, what)
            return
        args, kwargs = tree_map_only(Address, Address.tensor, step.arguments)
        for address, x in zip(step.results, tensors_in(step.run(*args, **kwargs)), strict=True):
            if address is not None:
                writes.append(address.tensor())
                writes[-1].copy_(x)
        session.run(session.streams.current.line, step.name, reads, writes)


class Capture:
    """Stands in for `torch.cuda.graph`: a capture, while it is entered."""

    def __init__(
        self,
        session: Session,
        graph: Graph,
        pool: Pool | None = None,
        stream: Stream | None = None,
        capture_error_mode: str = "global",
    ) -> None:
        self._session, self._graph = session, graph
        graph.pool = pool or graph.pool
        self._stream = stream or Stream(session.streams, "a stream of captures")
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # memory that is written -> it, its values
        self._taken: list[Region] = []

    def __enter__(self) -> None:
        assert self._session.capture is None, "two captures at once"
        self._session.streams.synchronize()
        self._on = self._session.streams.on(self._stream)
        self._on.__enter__()
        self._session.capture = self

    def __exit__(self, *error: Any) -> None:
        """Undo the operators' effects: a capture records them without running them."""
        self._session.capture = None
        self._on.__exit__(*error)
        with self._session.pausing():
            for memory, values in self._before.values():
                memory.copy_(values)
        for region in self._taken:
            region.memory.fill(POISON)

    def refuse(self, what: str) -> None:
        """Report something that CUDA forbids in a capture."""
        self._session.findings.report(CAPTURE, f"{self._session.operator(what)} in a capture")

    def write_down(
        self, name: str, run: Run, args: Any, kwargs: Any, writes: list[torch.Tensor], computes: bool
    ) -> Any:
        """Carry out an operator, so that its results are known, and write it down.

        Args:
            writes: those of its arguments that it writes.
            computes: False: it only makes views, or takes memory.
        """
        memory = self._session.memory
        if self._session.streams.current is not self._stream:
            self.refuse(f"{name} on {self._session.clocks.names[self._session.streams.current.line]}")
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and memory.on_device(x)]
        for x in writes:
            self._remember(x)
        arguments = tree_map_only(torch.Tensor, self._argument, (args, kwargs))
        known = {x.untyped_storage()._cdata for x in given}
        results: list[Address | None] = []

        def placed(x: torch.Tensor) -> torch.Tensor:
            if x.untyped_storage()._cdata in known:
                results.append(None)
                return x
            new, region = self._graph.pool.take(self._session, x)
            self._taken.append(region)
            results.append(self._address(new.copy_(x)))
            return new

        out = tree_map_only(torch.Tensor, placed, run(*args, **kwargs))
        if computes:
            reads = [self._address(x) for x in given if all(x is not other for other in writes)]
            step = Step(name, run, arguments, reads, [self._address(x) for x in writes], results)
            self._graph.steps.append(step)
        return out

    def _argument(self, x: torch.Tensor) -> Any:
        """Return the address of a tensor of the device; of one of the host, a kernel has the value."""
        return self._address(x) if self._session.memory.on_device(x) else x.clone()

    def _address(self, x: torch.Tensor) -> Address:
        layout = x.storage_offset(), x.shape, x.stride()
        return Address(self._session.memory.reference(x), x.dtype, layout)

    def _remember(self, x: torch.Tensor) -> None:
        """Keep the values of memory before an operator first writes there."""
        storage = self._session.memory.reference(x)()
        if storage._cdata not in self._before:
            memory = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
            self._before[storage._cdata] = memory, memory.clone()
