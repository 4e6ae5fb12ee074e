"""Storages of the pretended GPU: where each is, who has touched which of its bytes, and which stream owns it."""

import weakref
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import torch

from megazero.engine.plan.program.operations import Op, name_of
from tests.pretended_gpu.clocks import HOST, Clocks, Line, Tick
from tests.pretended_gpu.findings import EARLY_FREE, RACE, Findings


class Place(Enum):
    """Memory that holds a storage on a machine with a GPU."""

    DEVICE = "device memory"
    PINNED = "pinned memory"
    HOST = "host memory"


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of an argument or a result."""
    if isinstance(value, torch.Tensor):
        return [value]
    if not isinstance(value, list | tuple):
        return []
    return [x for each in value for x in tensors_in(each)]


class Operator(NamedTuple):
    """An operator that was issued, for reports: its name, and the operation of the program that it is part of."""

    name: str
    op: Op | None

    def __str__(self) -> str:
        return self.name if self.op is None else f"{self.name} [{name_of(self.op)}]"


class Access(NamedTuple):
    """The bytes [low, high) of a storage, read or written by one operator."""

    low: int
    high: int
    writes: bool
    line: Line
    tick: Tick
    operator: Operator


class Block:
    """One storage. `owner`: the stream for which the caching allocator has cut it from its memory."""

    __slots__ = ("accesses", "num_bytes", "owner", "place", "reference")

    def __init__(self, place: Place, owner: Line, num_bytes: int) -> None:
        self.place, self.owner, self.num_bytes = place, owner, num_bytes
        self.accesses: list[Access] = []
        self.reference: weakref.ref[torch.UntypedStorage] | None = None


class Memory:
    """All storages that a session has seen. One that it has not seen is in host memory.

    Attributes:
        allocated, peak: bytes of device memory now, and the most since the peak was reset.
        closed: the session is over; tensors that are freed from now on are not looked at.
    """

    def __init__(self, clocks: Clocks, findings: Findings) -> None:
        self.clocks, self.findings = clocks, findings
        self.allocated = self.peak = 0
        self.closed = False
        self._blocks: dict[int, Block] = {}  # address of torch's StorageImpl -> block
        self._shared: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def place(self, x: torch.Tensor) -> Place:
        return self.place_of(x.untyped_storage()._cdata)

    def place_of(self, number: int) -> Place:
        """Return the place of a storage; number: the address of torch's StorageImpl."""
        block = self._blocks.get(number)
        return Place.HOST if block is None else block.place

    def on_device(self, x: torch.Tensor) -> bool:
        return self.place(x) is Place.DEVICE

    def put(self, x: torch.Tensor, place: Place, owner: Line) -> None:
        """Note the place of a new tensor's storage."""
        storage = x.untyped_storage()
        key = storage._cdata
        if place is Place.HOST or key in self._blocks:
            return
        block = self._blocks[key] = Block(place, owner, storage.nbytes())
        block.reference = weakref.ref(storage, lambda _: self._freed(key))
        if place is Place.DEVICE:
            self.allocated += block.num_bytes
            self.peak = max(self.peak, self.allocated)

    def share(self, storage: torch.UntypedStorage, with_: torch.Tensor, freed: Callable[[], None]) -> None:
        """Note that a new storage is in the memory of a tensor that is known; call `freed` when it is gone."""
        key = storage._cdata
        self._blocks[key] = self._blocks[with_.untyped_storage()._cdata]

        def forget(_: Any) -> None:
            del self._blocks[key], self._shared[key]
            freed()

        self._shared[key] = weakref.ref(storage, forget)

    def reference(self, x: torch.Tensor) -> weakref.ref[torch.UntypedStorage]:
        """Return a reference to the storage that the memory of x was first known by."""
        reference = self._blocks[x.untyped_storage()._cdata].reference
        assert reference is not None
        return reference

    def _freed(self, key: int) -> None:
        """Note that a storage is gone.

        The caching allocator hands its memory out again at once, to the owner's later operations. So all accesses by
        other streams must be ordered before those. Pinned memory is kept until the copies from and to it are done.
        """
        block = self._blocks.pop(key)
        if block.place is not Place.DEVICE or self.closed:
            return
        self.allocated -= block.num_bytes
        owner, names = block.owner, self.clocks.names
        for access in block.accesses:
            if access.line != HOST and not self.clocks.is_ordered(access.tick, access.line, owner):
                verb = "writes" if access.writes else "reads"
                self.findings.report(
                    EARLY_FREE,
                    f"{access.operator} on {names[access.line]} {verb} a tensor of {block.num_bytes} bytes that is "
                    f"freed; {names[owner]}, whose memory it is, has not waited for that",
                )

    def touch(self, x: torch.Tensor, writes: bool, line: Line, tick: Tick, operator: Operator) -> None:
        """Note an access, and report those of the same bytes that it races with.

        A strided view counts as all bytes from its first element to its last.
        """
        block = self._blocks.get(x.untyped_storage()._cdata)
        if block is None or x.numel() == 0:
            return
        size = x.element_size()
        low = x.storage_offset() * size
        if x.is_contiguous():
            high = low + size * x.numel()
        else:
            high = low + size * (1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)))
        new = Access(low, high, writes, line, tick, operator)
        kept = []
        for old in block.accesses:
            ordered = self.clocks.is_ordered(old.tick, old.line, line)
            if not ordered and (old.writes or writes) and old.low < high and low < old.high:
                self._report_race(block, old, new)
            # A later access that races with the old one would race with this one too.
            replaced = ordered and low <= old.low and old.high <= high
            if not (replaced and (writes or (not old.writes and old.line == line))):
                kept.append(old)
        kept.append(new)
        block.accesses = kept

    def _report_race(self, block: Block, old: Access, new: Access) -> None:
        names, verbs = self.clocks.names, ("reads", "writes")
        self.findings.report(
            RACE,
            f"{new.operator} on {names[new.line]} {verbs[new.writes]} bytes of a tensor in {block.place.value} that "
            f"{old.operator} on {names[old.line]} {verbs[old.writes]}; nothing orders them",
        )
