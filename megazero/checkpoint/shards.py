"""Shards: a rank's part of a globally named tensor, its regions, and their division into chunks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Self

import torch

from megazero.checkpoint.regions import Region, regions, split
from megazero.engine.plan.layout.flat_layout import Range
from megazero.engine.plan.layout.parameters import LocalBlock, ParamSpec

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

    @classmethod
    def of(cls, spec: ParamSpec, block: LocalBlock, owned: Range, data: torch.Tensor) -> Self:
        """Return the shard of a parameter that is `owned`, a flat range of the rank's block."""
        return cls(spec.shape, block.offset, block.shape, start=owned.start, stop=owned.stop, data=data)

    @property
    def geometry(self) -> tuple[object, ...]:
        """Everything but the data."""
        return self.global_shape, self.offset, self.local_shape, self.start, self.stop


def owned_regions(shard: LocalShard) -> list[Region]:
    """Return the owned range as regions of the global tensor, in the order of the shard's data."""
    return [r.moved(shard.offset) for r in regions(shard.local_shape, shard.start, shard.stop)]


def owned_chunks(shard: LocalShard) -> list[Region]:
    """Return `owned_regions`, split into regions of at most CHUNK_BYTES. Equal shards give equal chunks."""
    limit = CHUNK_BYTES // shard.data.element_size()
    return [chunk for region in owned_regions(shard) for chunk in split(region, limit)]


def views_of(shard: LocalShard, pieces: Sequence[Region]) -> Iterator[torch.Tensor]:
    """Yield the elements of the data in each of `owned_regions` or of `owned_chunks`, in its shape."""
    position = 0
    for piece in pieces:
        yield shard.data.detach()[position : position + piece.volume].view(piece.size)
        position += piece.volume
    assert position == len(shard.data), (position, len(shard.data))
