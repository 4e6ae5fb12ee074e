"""`Mesh`: the axes of this rank."""

import datetime
import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
import torch.distributed as dist

from megazero.engine.mesh.collectives import Axis
from megazero.engine.mesh.groups import GroupMaker
from megazero.engine.mesh.in_flight import InFlight
from megazero.engine.mesh.peer_errors import peer_errors
from megazero.engine.plan.layout.topology import AXES, KINDS_OF_TRAFFIC, SUB_AXES, TRAFFIC, Layout

URGENT = ("tp", "cp", "shard", "etp", "ep", "expert_shard")  # computation waits for these axes within a layer


@dataclass(frozen=True)
class Mesh:
    """This rank's coordinates and axes.

    `cp` joins the ranks that share the tokens of a sample; `data` all of dp x cp, which hold the same weights.
    `embedding` joins the first and the last stage, which both hold a tied token table; `world` joins all ranks.
    `ep` joins the ranks that share the experts of a layer, `etp` those that share each expert.
    `shard` and `replica` divide `data`: ZeRO partitions within `shard`, and ranks along `replica` own the same range.
    """

    layout: Layout
    rank: int
    device: torch.device
    pp: Axis
    dp: Axis
    cp: Axis
    data: Axis
    shard: Axis
    replica: Axis
    tp: Axis
    embedding: Axis
    etp: Axis
    ep: Axis
    expert_shard: Axis
    expert_replica: Axis
    world: Axis
    host: Axis  # all ranks, for tensors in host memory: `world`, or on a GPU an axis of its own, over gloo
    in_flight: InFlight  # shared by all axes
    copied: Counter[str] = field(default_factory=Counter)  # kind of traffic -> bytes to and from host memory

    @classmethod
    def build(
        cls,
        layout: Layout,
        rank: int,
        device: torch.device,
        timeout_minutes: float = 10.0,
        check_buffers: bool = True,
        hosts: Sequence[str] = (),
    ) -> Self:
        """Make every axis' groups; all ranks call this, after `start`.

        Args:
            check_buffers: refuse operations that overlap the buffers of a collective in flight; see `InFlight`.
            hosts: each rank's host, from `start`, for messages.
        """
        peers = [other for other in range(layout.world_size) if other != rank]
        timeout = datetime.timedelta(minutes=timeout_minutes)
        with peer_errors("making the groups of ranks", peers, hosts):
            in_flight = InFlight(check_buffers)
            maker = GroupMaker(device, timeout)
            everyone = list(range(layout.world_size))
            make = functools.partial(Axis, rank=rank, in_flight=in_flight, hosts=hosts)
            # Before the splits, because some versions of torch count splits on members alone, and would hang here.
            gloo = None
            if peers and device.type != "cpu":
                gloo = dist.new_group(backend="gloo", timeout=timeout)
            axes = {"embedding": Axis("embedding", [rank], rank)}  # in a middle stage: this rank alone
            for name in URGENT + tuple(name for name in (*AXES, *SUB_AXES) if name not in URGENT):
                group = maker.of_axis(layout.groups(name), name, urgent=name in URGENT)
                for ranks in layout.groups(name):
                    if rank in ranks:
                        axes[name] = make(name, ranks, group=group)
            if device.type != "cpu":
                make_links(layout, axes["pp"], maker)
            world = dist.group.WORLD if peers else None
            axes["host"] = axes["world"] = make("world", everyone, group=world)
            if gloo is not None:
                axes["host"] = make("host", everyone, group=gloo)
            mesh = cls(layout, rank, device, in_flight=in_flight, **axes)
            mesh.connect()
            return mesh

    @property
    def axes(self) -> tuple[Axis, ...]:
        """All axes, in the same order on every rank."""
        axes = (*(getattr(self, name) for name in (*AXES, *SUB_AXES)), self.world)
        return axes if self.host is self.world else (*axes, self.host)

    def axis(self, name: str) -> Axis:
        """Return the axis of this name."""
        return next(axis for axis in self.axes if axis.name == name)

    def connect(self) -> None:
        """Exchange an element along every axis and every link, without counting it as traffic.

        Note [connections]: NCCL connects two ranks inside their first common call, and both must then have issued the
        same operations; a pipeline's first calls differ between its stages. So all ranks connect here, in one order,
        which also finds unreachable ranks before the first step.
        """
        for axis in self.axes:
            axis.all_reduce_(torch.zeros(1, device="cpu" if axis is self.host else self.device))
        for first, direction, lane in self.layout.links():
            sender, receiver = (first, first + 1) if direction > 0 else (first + 1, first)
            x = torch.zeros(1, device=self.device)
            if self.pp.rank == sender % self.pp.size:
                self.pp.start_send(x, direction, lane, tag=0).wait()
            elif self.pp.rank == receiver % self.pp.size:
                self.pp.start_recv(x, -direction, lane, tag=0).wait()
        for axis in self.axes:
            axis.sent.clear()

    def sent(self) -> dict[str, int]:
        """Return the bytes sent so far, by kind of traffic."""
        total: Counter[str] = Counter(dict.fromkeys(KINDS_OF_TRAFFIC, 0))
        total.update(self.copied)
        for axis in self.axes:
            for kind, num_bytes in axis.sent.items():
                total[TRAFFIC.get(kind, kind)] += num_bytes
        return dict(total)

    def control_sum(self, x: torch.Tensor, *axes: Axis) -> torch.Tensor:
        """Sum a few numbers x [n] over `axes` in place, counted as control traffic; returns x."""
        for axis in axes:
            axis.all_reduce_(x, kind="control")
        return x

    def read(self, x: torch.Tensor) -> list[float]:
        """Return the values of x [n], after waiting for the device to compute them."""
        return x.tolist()

    def agree(self, value: int, op: dist.ReduceOp.RedOpType) -> int:
        """Reduce a number over all ranks, from host to host, without waiting for a device."""
        return int(self.host.all_reduce_(torch.tensor(value), op=op, kind="control"))


def make_links(layout: Layout, pp: Axis, maker: GroupMaker) -> None:
    """Make the communicators of every pipeline's links; see Note [links]. All ranks call this."""
    links = layout.links()
    for direction, lane in sorted({(direction, lane) for _, direction, lane in links}):
        pairs = {
            (ranks[first], ranks[(first + 1) % len(ranks)]): first
            for ranks in layout.groups("pp")
            for first, *way in links
            if way == [direction, lane]
        }
        found = maker.make([tuple(sorted(pair)) for pair in pairs], f"pp{direction:+d} lane {lane}")
        for pair, first in pairs.items():
            group = found.get(tuple(sorted(pair)))
            if group is not None:
                pp.links[first, direction, lane] = group
