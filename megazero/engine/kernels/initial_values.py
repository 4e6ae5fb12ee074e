"""Initial weights by coordinate: the same values in every layout.

A block of 2^16 elements of a global tensor has a seed of its own, made of the run's seed, the name and the block's
number. A rank draws the blocks that it needs, in as many threads as torch has.
"""

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor

import torch

from megazero.engine.plan.layout.parameters import LocalBlock, ParamSpec

BLOCK = 1 << 16  # elements of the global tensor that share a seed


def seed_of(*coordinates: object) -> int:
    """Return a 63-bit seed made of coordinates."""
    digest = hashlib.blake2b("/".join(map(str, coordinates)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def standard_normal(seed: int, name: str, start: int, stop: int) -> torch.Tensor:
    """Return elements [start, stop) of the row-major global tensor `name`, fp32, on the CPU."""
    out = torch.empty(stop - start)

    def fill(block: int) -> None:
        at = block * BLOCK
        mine = out[max(at - start, 0) : at + BLOCK - start]
        # a whole block, because a generator's values depend on how many are requested
        values = mine if len(mine) == BLOCK else torch.empty(BLOCK)
        values.normal_(generator=torch.Generator().manual_seed(seed_of(seed, name, block)))
        if values is not mine:
            mine.copy_(values[max(start - at, 0) :][: len(mine)])

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        list(threads.map(fill, range(start // BLOCK, -(-stop // BLOCK))))
    return out


def draw(seed: int, spec: ParamSpec, block: LocalBlock, start: int, stop: int) -> torch.Tensor:
    """Return initial values of elements [start, stop) of a row-major local block; fp32, on the CPU."""
    assert 0 <= start <= stop <= block.numel, (spec.name, start, stop, block)
    if spec.std == 0.0 or start == stop:
        return torch.full((stop - start,), spec.mean)
    return _draw_part(seed, spec, block, start=start, stop=stop).mul_(spec.std).add_(spec.mean)


def _draw_part(seed: int, spec: ParamSpec, block: LocalBlock, start: int, stop: int) -> torch.Tensor:
    """Draw from a tensor that is sharded over a `dim`, and at most dim 0 too. A row is an index of the dims before it.

    Of wide rows only this rank's part is drawn, row by row. Narrow rows are drawn whole, several at a time.
    """
    dim = max((dim for dim, _ in spec.sharded), default=0)
    assert spec.shape[1:dim] == block.shape[1:dim], (spec, block)
    row, width = math.prod(spec.shape[dim:]), math.prod(block.shape[dim:])
    offset = block.offset[dim] * math.prod(spec.shape[dim + 1 :])
    if dim == 0:
        return standard_normal(seed, spec.name, offset + start, offset + stop)
    above = block.offset[0] * math.prod(spec.shape[1:dim])  # rows before this rank's
    first, last = start // width, -(-stop // width)
    if width > BLOCK:
        rows = ((at * width, (above + at) * row + offset) for at in range(first, last))
        parts = (range(here + max(start - at, 0), here + min(stop - at, width)) for at, here in rows)
        return torch.cat([standard_normal(seed, spec.name, part.start, part.stop) for part in parts])
    out = torch.empty((last - first) * width)
    rows = max(1, 16 * BLOCK // row)  # a chunk's rows, so that memory is bounded
    for at in range(first, last, rows):
        end = min(at + rows, last)
        values = standard_normal(seed, spec.name, (above + at) * row, (above + end) * row).view(-1, row)
        out[(at - first) * width : (end - first) * width] = values[:, offset : offset + width].flatten()
    return out[start - first * width : stop - first * width]
