"""Shards: a rank's part of a globally named tensor, and its division into chunks."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from megazero.plan.layout.regions import Region, regions, split

# A chunk is the unit of writing, of checksums and of reading, so this bounds the host memory of a save and
# the bytes that a load reads in vain; small enough for that, large enough that 1e12 parameters are some 1e5
# chunks.
CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True, eq=False)
class LocalShard:
    """A rank's piece of a globally named tensor: the flat range [start, stop) of its row-major local block.

    Lengths and offsets are in elements. `start == stop` is a rank that owns nothing of its block. The same
    shard on several ranks (what tensor parallelism replicates, ZeRO stage 0, a tied table) is written once.
    """

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]  # of the local block in the global tensor
    local_shape: tuple[int, ...]  # of the local block (the tensor-parallel shard), padding excluded
    start: int  # of the owned range of the local block (the ZeRO shard)
    stop: int
    data: torch.Tensor  # [stop - start], contiguous; read by save, written in place by load

    def __post_init__(self) -> None:
        assert all(size > 0 for size in self.global_shape), self.global_shape
        assert len(self.global_shape) == len(self.offset) == len(self.local_shape), self
        assert all(
            0 <= o and o + n <= size
            for o, n, size in zip(self.offset, self.local_shape, self.global_shape, strict=True)
        ), (self.global_shape, self.offset, self.local_shape)
        assert 0 <= self.start <= self.stop <= prod(self.local_shape), (
            self.start,
            self.stop,
            self.local_shape,
        )
        assert self.data.shape == (self.stop - self.start,), (self.data.shape, self.start, self.stop)
        assert self.data.is_contiguous(), self.data.stride()

    def regions(self) -> list[Region]:
        """The owned range as regions of the global tensor, in the order of `data`."""
        return [r.moved(self.offset) for r in regions(self.local_shape, self.start, self.stop)]

    def chunks(self) -> list[Region]:
        """`regions()`, split into regions of at most CHUNK_BYTES; equal shards give equal chunks."""
        limit = CHUNK_BYTES // self.data.element_size()
        return [chunk for region in self.regions() for chunk in split(region, limit)]

    def views(self, pieces: list[Region]) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """(offset, its elements of `data`, shaped) of each piece of `regions()` or of `chunks()`."""
        position = 0
        for piece in pieces:
            yield piece.offset, self.data.detach()[position : position + piece.volume].view(piece.size)
            position += piece.volume
        assert position == len(self.data), (position, len(self.data))
