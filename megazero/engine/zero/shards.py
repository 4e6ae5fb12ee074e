"""Shards: a rank's part of a globally named tensor, and its division into chunks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

from megazero.engine.plan.layout.regions import Region, regions, split

# A chunk is written, checked and read as a whole. So this bounds the host memory of a save, and the bytes that a load
# reads and does not need. 10^12 parameters are about 10^5 chunks.
CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True, eq=False)
class LocalShard:
    """A rank's piece of a globally named tensor: the flat range [start, stop) of its row-major local block.

    Lengths and offsets are in elements. A rank that owns nothing of its block has `start == stop`. If several ranks
    hold the same shard (tensor-parallel replicas, ZeRO stage 0, a tied table), one of them writes it.
    """

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]  # first element of the local block in the global tensor
    local_shape: tuple[int, ...]  # shape of the local block (the tensor-parallel shard), padding excluded
    start: int  # the owned range of the local block (the ZeRO shard) begins here
    stop: int
    data: torch.Tensor  # [stop - start], contiguous; read by save, written in place by load

    def __post_init__(self) -> None:
        assert all(size > 0 for size in self.global_shape), self.global_shape
        assert all(
            0 <= o and o + n <= size
            for o, n, size in zip(self.offset, self.local_shape, self.global_shape, strict=True)
        ), self.geometry
        assert 0 <= self.start <= self.stop <= prod(self.local_shape), self.geometry
        assert self.data.shape == (self.stop - self.start,) and self.data.is_contiguous(), self.geometry

    @property
    def geometry(self) -> tuple[object, ...]:
        """Everything but the data."""
        return self.global_shape, self.offset, self.local_shape, self.start, self.stop

    def regions(self) -> list[Region]:
        """Return the owned range as regions of the global tensor, in the order of `data`."""
        return [r.moved(self.offset) for r in regions(self.local_shape, self.start, self.stop)]

    def chunks(self) -> list[Region]:
        """Return `regions()`, split into regions of at most CHUNK_BYTES. Equal shards give equal chunks."""
        limit = CHUNK_BYTES // self.data.element_size()
        return [chunk for region in self.regions() for chunk in split(region, limit)]

    def views(self, pieces: Sequence[Region]) -> Iterator[torch.Tensor]:
        """Yield the elements of `data` in each of `regions()` or of `chunks()`, in its shape."""
        position = 0
        for piece in pieces:
            yield self.data.detach()[position : position + piece.volume].view(piece.size)
            position += piece.volume
        assert position == len(self.data), (position, len(self.data))
