"""Axes and a mesh of which only this rank exists. They count the bytes of each collective, and send nothing."""

from collections.abc import Callable
from typing import Any

import torch

from megazero.engine.mesh.collectives import Axis
from megazero.engine.mesh.in_flight import InFlight
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.plan.layout.topology import AXES, SUB_AXES, TRAFFIC, Layout


class _Done:
    """A collective that is complete at once."""

    def wait(self) -> None:
        pass


class PretendAxis(Axis):
    """One rank of an axis without its peers: every collective returns at once and leaves its output as it is.

    For stand-in tensors, whose values do not matter.
    `needs_staging_buffer`: take gloo's paths, or else NCCL's.

    Attributes:
        issued: (kind of traffic, operation) -> (calls, bytes that this rank would have sent).
    """

    pretended = True

    def __init__(self, name: str, ranks: list[int], rank: int, needs_staging_buffer: bool) -> None:
        super().__init__(name=name, ranks=ranks, rank=rank, group=None, in_flight=InFlight(checks=False))
        self._needs_staging_buffer = needs_staging_buffer
        self.issued: dict[tuple[str, str], tuple[int, int]] = {}

    @property
    def needs_staging_buffer(self) -> bool:
        return self._needs_staging_buffer and bool(self.peers)

    def _issued(self, operation: str, kind: str, num_bytes: int) -> None:
        super()._issued(operation, kind, num_bytes)
        calls, total = self.issued.get((kind, operation), (0, 0))
        self.issued[kind, operation] = calls + 1, total + num_bytes

    def _launch(self, collective: Callable[[], Any], reads: Any, writes: Any) -> _Done:
        return _Done()


class PretendMesh(Mesh):
    """The mesh of one rank without its peers."""

    def read(self, x: torch.Tensor) -> list[float]:
        """Return ones, because stand-ins have no values. A step continues with 1 as norm, loss or number of targets."""
        return [1.0] * x.numel()

    def issued(self) -> dict[tuple[str, str, str], tuple[int, int]]:
        """Return (axis, kind of traffic, operation) -> (calls, bytes that this rank would have sent)."""
        return {
            (axis.name, TRAFFIC.get(kind, kind), operation): count
            for axis in self.axes
            if isinstance(axis, PretendAxis)
            for (kind, operation), count in axis.issued.items()
        }


def pretend_mesh(
    layout: Layout,
    rank: int,
    device: torch.device,
    needs_staging_buffer: bool,
    make: Callable[[str, list[int], int, bool], PretendAxis] = PretendAxis,
) -> PretendMesh:
    """Make the mesh of one rank of `layout`, without peers; `make` makes its axes."""
    axes: dict[str, Axis] = {"embedding": make("embedding", [rank], rank, needs_staging_buffer)}
    for name in (*AXES, *SUB_AXES):
        for ranks in layout.groups(name):
            if rank in ranks:
                axes[name] = make(name, ranks, rank, needs_staging_buffer)
    axes["world"] = make("world", list(range(layout.world_size)), rank, needs_staging_buffer)
    return PretendMesh(layout, rank, device, host=axes["world"], in_flight=InFlight(checks=False), **axes)  # type: ignore[arg-type]
