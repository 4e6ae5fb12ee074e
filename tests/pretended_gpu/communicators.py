"""NCCL's communicators on the pretended GPU: streams of their own, and one order of operations for all members.

gloo carries the bytes. The order is NCCL's: a communicator runs its operations one after the other, each behind the
stream that was current when it was issued; `wait` orders the current stream behind it, and the host does not wait.
NCCL matches operations by their order alone, tags mean nothing to it. So the n-th operations of all members must be the
same: the member that issues it first writes it to the store, and the others compare theirs with that.
"""

import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from megazero.engine.mesh.collectives import Axis
from tests.pretended_gpu.clocks import Line
from tests.pretended_gpu.findings import UNMATCHED_ORDER, Findings
from tests.pretended_gpu.memory import Memory, Operator, tensors_in
from tests.pretended_gpu.streams import Event, Streams

# c10d's operator -> name, and which arguments it reads and writes
OPERATIONS = {
    "allreduce_": ("all-reduce", [0], [0]),
    "_allgather_base_": ("all-gather", [1], [0]),
    "allgather_": ("all-gather", [1], [0]),
    "_reduce_scatter_base_": ("reduce-scatter", [1], [0]),
    "alltoall_base_": ("all-to-all", [1], [0]),
    "broadcast_": ("broadcast", [0], [0]),
    "reduce_": ("reduce", [0], [0]),
    "send": ("send", [0], []),
    "recv_": ("receive", [], [0]),
}
MESSAGES = ("send", "receive")
Pausing = Callable[[], AbstractContextManager[None]]


class UnmatchedOrder(RuntimeError):
    """The members of a communicator issue different operations. NCCL would hang, or mix up their data."""


class Ledger:
    """The operations of every communicator, in order, as its first member to issue each wrote it down."""

    def __init__(self, findings: Findings) -> None:
        self.findings, self.counts = findings, Counter[str]()
        self._store: dist.Store | None = None

    def _open(self) -> dist.Store:
        """Agree on a place in the store. The world's first operation is the first of all, so all ranks come here."""
        name = [uuid.uuid4().hex]
        dist.broadcast_object_list(name, src=0)
        return dist.PrefixStore(name[0], dist.distributed_c10d._get_default_store())

    def enter(self, communicator: str, operation: str) -> None:
        """Note this rank's next operation of a communicator.

        Raises:
            UnmatchedOrder: another member has issued something else in its place.
        """
        self._store = self._store or self._open()
        number = self.counts[communicator]
        self.counts[communicator] += 1
        ours = f"{dist.get_rank()}:{operation}"
        rank, _, theirs = self._store.compare_set(f"{communicator}/{number}", "", ours).decode().partition(":")
        if theirs != operation:
            self._report(
                f"operation {number} of communicator {communicator} is {operation} on rank {dist.get_rank()} and "
                f"{theirs} on rank {rank}"
            )

    def enter_parts(self, communicator: str, member: int, sends: Sequence[int], receives: Sequence[int]) -> None:
        """Note the rows of an all-to-all between this member and each other one, which must name the same numbers."""
        for other, (sent, received) in enumerate(zip(sends, receives, strict=True)):
            if other != member:
                up, down = (sent, received) if member < other else (received, sent)
                pair = f"{min(member, other)} and {max(member, other)}"
                self.enter(f"{communicator} between {pair}", f"an all-to-all of {up} rows up, {down} down")

    def close(self) -> None:
        """Compare how many operations the members have issued; all ranks call this while they have a group."""
        if self._store is None or not dist.is_initialized():
            return
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self.counts)
        for rank, counts in enumerate(everyone):
            for communicator in counts & self.counts:
                if counts[communicator] != self.counts[communicator]:
                    self._report(
                        f"communicator {communicator} has {self.counts[communicator]} operations on rank "
                        f"{dist.get_rank()} and {counts[communicator]} on rank {rank}"
                    )

    def _report(self, text: str) -> None:
        self.findings.report(UNMATCHED_ORDER, text)
        raise UnmatchedOrder(text)


class Communicators:
    """The communicators of one rank.

    Attributes:
        issued: the end of the latest operation on tensors of the device; None if there was none.
    """

    def __init__(self, streams: Streams, memory: Memory, findings: Findings, pausing: Pausing) -> None:
        self.streams, self.memory, self.clocks, self.pausing = streams, memory, streams.clocks, pausing
        self.ledger = Ledger(findings)
        self.issued: Event | None = None
        self._lines: dict[str, Line] = {}  # by name of the group

    def issue(
        self,
        func: torch._ops.OpOverload,
        args: Sequence[Any],
        is_async: bool,
        operator: Callable[[str], Operator],
    ) -> None:
        """Note one of c10d's operators before it is carried out; those on tensors of the host are gloo's own."""
        tensors = [tensors_in(arg) for arg in args]
        given = [x for several in tensors for x in several]
        if not any(self.memory.on_device(x) for x in given):
            return
        name, reads, writes = OPERATIONS[func.overloadpacket.__name__]
        group = dist.ProcessGroup.unbox(next(arg for arg in args if isinstance(arg, torch.ScriptObject)))
        communicator = group.group_name
        what = f"{name} of {'+'.join(str(x.numel()) for x in given)} x {given[0].dtype}"
        if name in MESSAGES:
            pair = (group.rank(), args[2]) if name == "send" else (args[2], group.rank())
            what = f"a message {pair[0]} -> {pair[1]} of {given[0].numel()} x {given[0].dtype}, tag {args[3]}"
            communicator += "" if group.size() == 2 else f" between {min(pair)} and {max(pair)}"
        if name == "all-to-all" and args[3]:  # parts of any sizes
            what = f"{name} of {given[0].dtype}"
            self.ledger.enter_parts(communicator, group.rank(), args[4], args[3])
        self.ledger.enter(communicator, what)
        if group.group_name not in self._lines:
            self._lines[group.group_name] = self.clocks.new_line(f"communicator {group.group_desc}")
        line, ready, done = self._lines[group.group_name], Event(self.streams), Event(self.streams)
        ready.record()
        self.clocks.wait(line, ready.number)
        tick = self.clocks.issue(line)
        for indices, are_writes in ((reads, False), (writes, True)):
            for x in (x for i in indices for x in tensors[i]):
                self.memory.touch(x, are_writes, line, tick, operator(name))
        self.clocks.record(done.number, line)
        self.issued = done
        if not is_async:
            done.wait()

    def launch(
        self,
        axis: Axis,
        collective: Callable[[], Any],
        reads: tuple[torch.Tensor, ...] = (),
        writes: tuple[torch.Tensor, ...] = (),
    ) -> Any:
        """Stand in for `Axis._launch`."""
        self.issued = None
        work = collective()
        return work if self.issued is None else Work(work, self.issued, (*reads, *writes), self.pausing)

    def all_gather(self, parts: list[torch.Tensor], part: torch.Tensor, group: Any, async_op: bool = False) -> Any:
        """Stand in for `dist.all_gather` of parts of any size, which gloo does not have: broadcasts, as in NCCL."""
        with self.pausing():
            parts[dist.get_rank(group)].copy_(part)
        works = [
            dist.broadcast(each, dist.get_global_rank(group, rank), group, async_op)
            for rank, each in enumerate(parts)
            if each.numel()
        ]
        return Several(works) if async_op else None

    def reduce_scatter(self, out: torch.Tensor, parts: list[torch.Tensor], group: Any, async_op: bool) -> Any:
        """Stand in for `dist.reduce_scatter` of parts of any size: reductions, as in NCCL. gloo overwrites parts."""
        with self.pausing():
            own = [(each, each.clone()) for each in parts if each.numel()]
        works = Several(
            [
                dist.reduce(each, dist.get_global_rank(group, rank), group=group, async_op=async_op)
                for rank, each in enumerate(parts)
                if each.numel()
            ]
        )

        def finish() -> None:
            out.copy_(parts[dist.get_rank(group)])
            for each, before in own:
                each.copy_(before)

        works.finish = finish
        return works

    def split_group(
        self, split_ranks: list[list[int]], timeout: Any = None, pg_options: Any = None, group_desc: str = ""
    ) -> dist.ProcessGroup | None:
        """Stand in for `dist.split_group`, an operation of the world's communicator, which gloo does not have."""
        self.ledger.enter("of the world", f"a split into {split_ranks}")
        several = [ranks for ranks in split_ranks if len(ranks) > 1]  # a rank alone has nothing to send
        groups = [dist.new_group(ranks, timeout=timeout, group_desc=group_desc) for ranks in several]
        return next((group for group in groups if group is not dist.GroupMember.NON_GROUP_MEMBER), None)


class Several:
    """Several handles of gloo's as one."""

    def __init__(self, works: list[Any]) -> None:
        self.works = works
        self.finish: Callable[[], None] = lambda: None

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.finish()


class Work:
    """NCCL's handle of a collective: it keeps the tensors until it is waited for, and only the stream waits."""

    def __init__(self, work: Any, done: Event, held: tuple[torch.Tensor, ...], pausing: Pausing) -> None:
        self._work, self._done, self._held, self._pausing = work, done, held, pausing

    def wait(self) -> None:
        self.finish()
        self._done.wait()
        self._held = ()

    def finish(self) -> None:
        """Wait for the bytes alone: the fault of a program that leaves out `wait`."""
        with self._pausing():  # gloo copies its results here
            self._work.wait()
