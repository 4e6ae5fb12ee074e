"""The regions of a rank's shard of a tensor, their division into chunks, and views of its data."""

from collections.abc import Iterator, Sequence

import torch

from megazero.checkpoint.regions import Region, regions, split
from megazero.checkpoint.shards import LocalShard

# A chunk is written, checked and read as a whole. So this bounds the host memory of a save, and the bytes that a load
# reads and does not need. 10^12 parameters are about 10^5 chunks.
CHUNK_BYTES = 64 * 2**20


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
