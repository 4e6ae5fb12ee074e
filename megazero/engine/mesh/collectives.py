"""`Axis`: the collectives along one axis of the mesh. `Pending`: a collective in flight.

Every collective is the identity on an axis of size 1. It asserts that its tensors are contiguous, because gloo's
all_reduce silently returns wrong sums for others, and counts the bytes that this rank sends under a ring algorithm.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from megazero.engine.mesh.in_flight import InFlight
from megazero.engine.mesh.peer_errors import peer_errors
from megazero.engine.plan.layout.flat_layout import Range
from megazero.engine.plan.layout.topology import ring_bytes, unsent

SUM, MAX, MIN = dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN

# torch 2.13 deprecates the old names; 2.11 lacks the new ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# -- axes


class Axis:
    """One mesh axis, seen from this rank.

    Attributes:
        sent: kind of traffic -> bytes that this rank has sent. The kind is the axis' name, or "control".
        pretended: whether there are no other ranks, so that nothing arrives.
        imbalance: of a pretended axis of experts: rows that this rank receives, over the mean of all ranks.
    """

    pretended = False
    imbalance = 1.0

    def __init__(
        self,
        name: str,
        ranks: list[int],
        rank: int,
        group: dist.ProcessGroup | None = None,
        in_flight: InFlight | None = None,
        hosts: Sequence[str] = (),
    ) -> None:
        """`rank`, `ranks`: numbers in the world; `hosts`: host of each rank of the world, for messages."""
        self.name, self.ranks, self.size = name, ranks, len(ranks)
        self.rank = ranks.index(rank)  # within the axis
        self.peers = [other for other in ranks if other != rank]
        self._others = [i for i in range(self.size) if i != self.rank]  # peers by their rank within the axis
        self._num_exchanges = 0  # tag of the messages of `_exchange`, equal on all ranks
        self.group = group
        self.in_flight = in_flight or InFlight()
        self.hosts = hosts
        # (position of the link's first rank, direction, lane) -> communicator; see Note [links]
        self.links: dict[tuple[int, int, int], dist.ProcessGroup] = {}
        self.sent: Counter[str] = Counter()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def needs_staging_buffer(self) -> bool:
        """Return true if a reduce-scatter needs scratch to receive every other rank's rows; see `_exchange`."""
        return self.size > 1 and dist.get_backend(self.group) == "gloo"

    def _count(
        self, operation: str, x: torch.Tensor, passes: int, kind: str | None, parts: Sequence[Range] = ()
    ) -> None:
        assert x.is_contiguous(), f"{self.name}: {operation} on shape {tuple(x.shape)}, stride {x.stride()}"
        num_bytes = x.nbytes
        if parts:
            num_bytes -= unsent(operation, parts, self.rank) * x.element_size()
        elif passes:
            num_bytes = ring_bytes(num_bytes, self.size, passes)
        self._issued(operation, kind or self.name, num_bytes)

    def _issued(self, operation: str, kind: str, num_bytes: int) -> None:
        """Count the bytes that this rank sends for a collective or a message."""
        self.sent[kind] += num_bytes

    def _launch(
        self, collective: Callable[[], _Work], reads: tuple[torch.Tensor, ...], writes: tuple[torch.Tensor, ...]
    ) -> _Work:
        """Issue an asynchronous collective. Tests replace it by a slower backend."""
        return collective()

    def _start(
        self,
        name: str,
        collective: Callable[[], _Work],
        *,
        reads: tuple[torch.Tensor, ...] = (),
        writes: tuple[torch.Tensor, ...] = (),
        result: torch.Tensor | None = None,
        then: Callable[[], object] | None = None,
        peer: int | None = None,
    ) -> Pending:
        """Start a collective.

        Args:
            reads, writes: tensors that the collective uses until its wait.
            result: the tensor that `then` writes. The wait calls `then` when the collective has finished.
            peer: of a message: the other rank, by its number in the world.
        """
        claimed = writes if result is None else (*writes, result)
        name = f"{name} over {self.name}"
        number = self.in_flight.add(name, reads, claimed)
        errors = self.peer_errors(name, peer)
        with errors:
            work = self._launch(collective, reads, writes)

        def wait() -> None:
            with errors:
                work.wait()
            self.in_flight.remove(number)

        return Pending(wait, held=(*reads, *writes), then=then)

    def peer_errors(self, action: str, peer: int | None = None) -> peer_errors:
        """Return a context for communication along this axis, which turns a peer's failure into PeerLost."""
        return peer_errors(action, self.peers if peer is None else (peer,), self.hosts)

    def start_all_reduce(self, x: torch.Tensor, op: dist.ReduceOp.RedOpType = SUM, kind: str | None = None) -> Pending:
        """All-reduce `x` in place; do not read or write it before the wait."""
        if self.size == 1:
            return Pending()
        self._count("all-reduce", x, 2, kind)
        return self._start(
            "all-reduce", lambda: dist.all_reduce(x, op=op, group=self.group, async_op=True), reads=(x,), writes=(x,)
        )

    def all_reduce_(self, x: torch.Tensor, op: dist.ReduceOp.RedOpType = SUM, kind: str | None = None) -> torch.Tensor:
        self.start_all_reduce(x, op, kind).wait()
        return x

    def start_all_gather(self, part: torch.Tensor, out: torch.Tensor, ranges: Sequence[Range] = ()) -> Pending:
        """Gather the ranks' `part`s into `out`. `part` may be a view of its own place in `out`.

        Args:
            ranges: the places of the parts in `out` [n], which they tile; without them it has equal parts in order.
        """
        if self.size == 1:
            if not _same_place(out, part):
                out.copy_(part.view_as(out))
            return Pending()
        parts = [out[each.slice()] for each in ranges] or list(out.view(self.size, -1))
        assert part.is_contiguous() and part.numel() == parts[self.rank].numel(), (part.shape, out.shape)
        self._count("all-gather", out, 1, kind=None, parts=ranges)
        if not self.needs_staging_buffer:

            def collective() -> _Work:
                if ranges:
                    return dist.all_gather(parts, part, self.group, async_op=True)
                return _all_gather(out, part, group=self.group, async_op=True)

            return self._start("all-gather", collective, reads=(part,), writes=(out,))

        def exchange() -> _Work:
            if not _same_place(parts[self.rank], part):
                parts[self.rank].copy_(part.view(-1))
            return self._exchange(dict.fromkeys(self._others, part), {i: parts[i] for i in self._others})

        return self._start("all-gather", exchange, reads=(part,), writes=(out,))

    def all_gather(self, part: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        self.start_all_gather(part, out).wait()
        return out

    def scratch_numel(self, numel: int) -> int:
        """Return the elements of scratch for a reduce-scatter with `numel` results; see Note [gloo's collectives]."""
        if self.size == 1:
            return 0
        return numel * (self.size - 1) if self.needs_staging_buffer else numel

    def start_reduce_scatter(
        self, full: torch.Tensor, out: torch.Tensor, add: bool, scratch: torch.Tensor, ranges: Sequence[Range] = ()
    ) -> Pending:
        """Sum `full` over the ranks. The wait writes this rank's part of the sum to `out`, or adds it if `add`.

        Shapes: full [n], out [part], scratch at least [scratch_numel(part)]. NCCL writes to `out` directly, and needs
        scratch only if `add`.

        Args:
            ranges: of `full`, which they tile, the ranks' parts; without them it has equal parts in order.
        """
        if self.size == 1:
            _write(out, full, add)
            return Pending()
        parts = [full[each.slice()] for each in ranges] or list(full.view(self.size, -1))
        assert full.dim() == 1 and out.shape == parts[self.rank].shape, (full.shape, out.shape)
        self._count("reduce-scatter", full, 1, kind=None, parts=ranges)
        scratch = scratch[: self.scratch_numel(out.numel())]
        start = functools.partial(self._start, "reduce-scatter", reads=(full,))
        if self.needs_staging_buffer:
            rows = dict(enumerate(parts))
            arriving = dict(zip(self._others, scratch.view(self.size - 1, out.numel()), strict=True))
            return start(
                lambda: self._exchange({i: rows[i] for i in self._others}, arriving),
                writes=(scratch,),
                result=out,
                then=lambda: _sum_rows([(rows | arriving)[i] for i in rows], out, add),
            )

        def collective(target: torch.Tensor) -> _Work:
            if ranges:
                return dist.reduce_scatter(target, parts, group=self.group, async_op=True)
            return _reduce_scatter(target, full, group=self.group, async_op=True)

        if not add:
            return start(lambda: collective(out), writes=(out,))
        return start(lambda: collective(scratch), writes=(scratch,), result=out, then=lambda: out.add_(scratch))

    def _exchange(self, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor]) -> _Work:
        """Send to and receive from other ranks of the axis, all at once; keys are ranks within the axis.

        Note [gloo's collectives]: gloo's all-gather allocates a second output and copies it. Its reduce-scatter is an
        all-reduce and a copy, which sends twice the bytes. Direct messages between all pairs of ranks send as many
        bytes as a ring, (size - 1) / size of the whole, and need no copy. The messages of a reduce-scatter stay in
        scratch until they are summed.
        """
        self._num_exchanges = (self._num_exchanges + 1) % (1 << 31)
        tag, group = self._num_exchanges, self.group
        works = [dist.irecv(x, self.ranks[i], group, tag) for i, x in receives.items() if x.numel()]
        works += [dist.isend(x, self.ranks[i], group, tag) for i, x in sends.items() if x.numel()]
        return _Works(works)

    def start_shift(self, x: torch.Tensor, out: torch.Tensor, step: int) -> Pending:
        """Send `x` to the rank `step` further along the axis, which is a ring, and receive `out` from `step` before.

        All ranks call this. On NCCL it is an all-to-all of one message per rank, so a send does not wait for a receive.
        """
        assert x.shape == out.shape and out.is_contiguous(), (x.shape, out.shape)
        if self.size == 1:
            out.copy_(x)
            return Pending()
        self._count("shift", x, 0, None)
        to, source = ((self.rank + way) % self.size for way in (step, -step))
        if self.needs_staging_buffer:
            return self._start("shift", lambda: self._exchange({to: x}, {source: out}), reads=(x,), writes=(out,))
        sent, received = ([x.numel() if rank == other else 0 for rank in range(self.size)] for other in (to, source))
        return self._start(
            "shift",
            lambda: dist.all_to_all_single(out.view(-1), x.view(-1), received, sent, self.group, async_op=True),
            reads=(x,),
            writes=(out,),
        )

    def start_all_to_all(self, x: torch.Tensor, out: torch.Tensor, sends: list[int], receives: list[int]) -> Pending:
        """Send the first `sends[0]` rows of `x` to the axis' first rank, and so on; receive `out` in the same order.

        All ranks call this, also with no rows. Shapes: x [sum(sends), ..], out [sum(receives), ..].
        """
        assert len(x) == sum(sends) and len(out) == sum(receives), (x.shape, out.shape, sends, receives)
        if self.size == 1:
            out.copy_(x)
            return Pending()
        own, per_row = self.rank, x.element_size() * math.prod(x.shape[1:])
        self._issued("all-to-all", self.name, (len(x) - sends[own]) * per_row)
        if not self.needs_staging_buffer:
            return self._start(
                "all-to-all",
                lambda: dist.all_to_all_single(out, x, receives, sends, self.group, async_op=True),
                reads=(x,),
                writes=(out,),
            )
        sent, received = x.split(sends), out.split(receives)

        def exchange() -> _Work:
            received[own].copy_(sent[own])
            return self._exchange(
                {i: sent[i] for i in self._others if sends[i]}, {i: received[i] for i in self._others if receives[i]}
            )

        return self._start("all-to-all", exchange, reads=(x,), writes=(out,))

    def start_send(self, x: torch.Tensor, step: int, lane: int, tag: int) -> Pending:
        """Send `x` to the next (step +1) or the previous (-1) rank of the axis, which is a ring.

        Do not write `x` before the wait. `tag`: matches a send with its receive.
        """
        self._count("send", x, 0, None)
        peer, link = self._neighbour(step), self._link(step, step, lane)
        return self._start("send", lambda: dist.isend(x, peer, link, tag), reads=(x,), peer=peer)

    def start_recv(self, x: torch.Tensor, step: int, lane: int, tag: int) -> Pending:
        """Receive into `x` from the next (step +1) or the previous (-1) rank of the axis. Read `x` after the wait."""
        peer, link = self._neighbour(step), self._link(step, -step, lane)
        return self._start("receive", lambda: dist.irecv(x, peer, link, tag), writes=(x,), peer=peer)

    def _neighbour(self, step: int) -> int:
        return self.ranks[(self.rank + step) % self.size]

    def _link(self, step: int, direction: int, lane: int) -> dist.ProcessGroup | None:
        """Return the communicator of the link to a neighbour, for messages in `direction`.

        Note [links]: NCCL runs the operations of one communicator in order, so a send that waits for its receiver
        would delay the receive after it. Hence a communicator per link, direction and lane
        (`engine.plan.layout.topology.Route`). gloo matches messages by tag and needs none.
        """
        first = self.rank if step > 0 else (self.rank - 1) % self.size
        return self.links.get((first, direction, lane), self.group)


class _Work(Protocol):
    """A backend's handle of an asynchronous collective."""

    def wait(self) -> object: ...


class _Works:
    """Several handles as one."""

    def __init__(self, works: Sequence[_Work | None]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            assert work is not None, "this rank is outside the group"
            work.wait()


class Pending:
    """A collective in flight, and the use of its result. It keeps its tensors alive until the wait.

    On a GPU, `wait` makes the compute stream wait, not this process. The backend runs a collective on its own stream,
    after all work that was on the compute stream when the collective was issued.
    """

    def __init__(
        self,
        wait: Callable[[], object] | None = None,
        held: tuple[torch.Tensor, ...] = (),
        then: Callable[[], object] | None = None,
    ) -> None:
        """`wait` returns when the backend has finished; `then` uses the result."""
        self._wait, self._held, self._then = wait, held, then

    def wait(self) -> None:
        """Wait once; a second call does nothing."""
        if self._wait is not None:
            self._wait()
        if self._then is not None:
            self._then()
        self._wait, self._held, self._then = None, (), None


class AsyncTensor(NamedTuple):
    """The result of a collective that may be in flight."""

    data: torch.Tensor
    pending: Pending

    def wait(self) -> torch.Tensor:
        self.pending.wait()
        return self.data


def in_one_group(pending: Sequence[Pending]) -> Pending:
    """Combine several collectives in flight into one."""

    def wait() -> None:
        for each in pending:
            each.wait()

    return Pending(then=wait)


def _same_place(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return true if two tensors begin at the same element of the same storage.

    Addresses are not compared, because the fake tensors of a rehearsal have none.
    """
    return StorageWeakRef(a.untyped_storage()) == StorageWeakRef(b.untyped_storage()) and (
        a.storage_offset() == b.storage_offset()
    )


def _write(out: torch.Tensor, values: torch.Tensor, add: bool) -> None:
    if add:
        out.add_(values)
    else:
        out.copy_(values)


def _sum_rows(rows: Sequence[torch.Tensor], out: torch.Tensor, add: bool) -> None:
    """Write the sum of `rows`, [n] each, to `out`, or add it. 16-bit rows are summed in fp32, a piece at a time."""
    if out.element_size() > 2:
        if not add:
            out.copy_(rows[0])
        for row in rows if add else rows[1:]:
            out.add_(row)
        return
    piece = 1 << 20
    for at in range(0, out.numel(), piece):
        target = out[at : at + piece]
        total = rows[0][at : at + piece].float()
        for row in rows[1:]:
            total += row[at : at + piece]
        target.copy_(total.add_(target) if add else total)
