"""`PretendAxis`: an axis of which only this rank exists. It counts what would be sent, and sends nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megazero.comm.collectives import Axis
from megazero.comm.in_flight import InFlight
from megazero.comm.mesh import Mesh
from megazero.plan.topology import AXES, SUB_AXES, Layout


class _Done:
    """A collective that is over at once."""

    def wait(self) -> None:
        pass


class PretendAxis(Axis):
    """One rank of an axis without its peers: every collective answers at once and leaves its output as it is.

    For stand-in tensors, whose values do not matter.
    `needs_staging_buffer`: take the paths of gloo, else those of NCCL.
    """

    def __init__(self, name: str, ranks: list[int], rank: int, needs_staging_buffer: bool) -> None:
        super().__init__(name, ranks, rank, None, InFlight(checks=False))
        self._needs_staging_buffer = needs_staging_buffer

    @property
    def needs_staging_buffer(self) -> bool:
        return self._needs_staging_buffer and self.size > 1

    def _launch(self, collective: Callable[[], Any], reads: Any, writes: Any) -> _Done:
        return _Done()


def pretend_mesh(layout: Layout, rank: int, device: torch.device, needs_staging_buffer: bool) -> Mesh:
    """Make the mesh of one rank of `layout`, without any other."""
    axes: dict[str, Axis] = {"embedding": PretendAxis("embedding", [rank], rank, needs_staging_buffer)}
    for name in (*AXES, *SUB_AXES):
        for ranks in layout.groups(name):
            if rank in ranks:
                axes[name] = PretendAxis(name, ranks, rank, needs_staging_buffer)
    axes["world"] = PretendAxis("world", list(range(layout.world_size)), rank, needs_staging_buffer)
    return Mesh(layout, rank, device, host_group=None, in_flight=InFlight(checks=False), **axes)
