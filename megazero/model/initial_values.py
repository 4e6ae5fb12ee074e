"""Initial weights by coordinate: the same values in every layout.

Drawn by (seed, global name, block of 2^16 elements of the global tensor); a rank draws what it owns.
"""

from __future__ import annotations

import hashlib
import math

import torch

from megazero.plan.parameters import LocalBlock, ParamSpec

BLOCK = 1 << 16  # elements of the global tensor that share a seed


def seed_of(*coordinates: object) -> int:
    """A 63-bit seed from coordinates."""
    digest = hashlib.blake2b("/".join(map(str, coordinates)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def standard_normal(seed: int, name: str, start: int, stop: int) -> torch.Tensor:
    """Elements [start, stop) of the row-major global tensor `name`, fp32, on the CPU; draws what it touches."""
    out = torch.empty(stop - start)
    for block in range(start // BLOCK, -(-stop // BLOCK)):
        at = block * BLOCK
        # Always a whole block: what a generator gives depends on how many are asked for.
        values = torch.empty(BLOCK).normal_(generator=torch.Generator().manual_seed(seed_of(seed, name, block)))
        first, last = max(at, start), min(at + BLOCK, stop)
        out[first - start : last - start] = values[first - at : last - at]
    return out


def draw(seed: int, spec: ParamSpec, block: LocalBlock, start: int, stop: int) -> torch.Tensor:
    """Initial values of elements [start, stop) of a row-major local block; fp32, on the CPU."""
    assert 0 <= start <= stop <= block.numel, (spec.name, start, stop, block)
    if spec.std == 0.0 or start == stop:
        return torch.full((stop - start,), spec.mean)
    if spec.tp_dim in (None, 0):
        at = block.offset[0] * math.prod(spec.shape[1:])
        return standard_normal(seed, spec.name, at + start, at + stop).mul_(spec.std).add_(spec.mean)
    assert spec.tp_dim == 1, (spec.name, spec.shape)
    return _draw_columns(seed, spec, block, start, stop).mul_(spec.std).add_(spec.mean)


def _draw_columns(seed: int, spec: ParamSpec, block: LocalBlock, start: int, stop: int) -> torch.Tensor:
    """Draw a tensor that is sharded over dim 1, seen as a matrix of dim 0 against all others: our columns of it.

    Wide rows one by one, of which our columns alone are drawn; of narrow ones a block of whole rows at a time.
    """
    row, width = math.prod(spec.shape[1:]), math.prod(block.shape[1:])
    offset = block.offset[1] * math.prod(spec.shape[2:])
    first, last = start // width, -(-stop // width)
    if width > BLOCK:
        parts = []
        for at in range(first, last):
            begin, end = max(start - at * width, 0), min(stop - at * width, width)
            parts.append(standard_normal(seed, spec.name, at * row + offset + begin, at * row + offset + end))
        return torch.cat(parts)
    out = torch.empty((last - first) * width)
    rows = max(1, 16 * BLOCK // row)  # never the whole global tensor
    for at in range(first, last, rows):
        end = min(at + rows, last)
        values = standard_normal(seed, spec.name, at * row, end * row).view(-1, row)
        out[(at - first) * width : (end - first) * width] = values[:, offset : offset + width].flatten()
    return out[start - first * width : stop - first * width]
