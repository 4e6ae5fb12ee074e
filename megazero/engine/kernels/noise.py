"""Random bits for rounding, by coordinate: the same bits in every layout.

The bits of an element are a hash of (seed, name of the weight, number of the update, block in the global tensor, place
in the block). A block is BLOCK neighbours in a row.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from megazero.engine.kernels.hashing import FIRST_ROUND, GOLDEN, SECOND_ROUND, mix_, round_, scalars, signed
from megazero.engine.kernels.initial_values import seed_of
from megazero.engine.options.optimizers import BLOCK, MOST_BLOCKS
from megazero.engine.plan.layout.flat_layout import Range
from megazero.engine.plan.layout.parameters import LocalBlock, ParamSpec


class NoisePiece(NamedTuple):
    """Elements [start, ..) of a local block of a weight, and their place in a flat slice."""

    spec: ParamSpec
    block: LocalBlock
    start: int
    place: Range


def _place(seed: int, piece: NoisePiece) -> tuple[int, ...]:
    """Describe the blocks of a piece. At most dim 0 and one other leading dim are sharded.

    Returns:
        The first block, in the slice; the shift from there to its local number; local blocks of a row, and local rows
        of an index of the outer dims; the same two of the global tensor; this rank's first row, and its first block in
        a row, in the global tensor; both halves of the weight's key.
    """
    spec, block, key = piece.spec, piece.block, seed_of(seed, "moments", piece.spec.name)
    leading = [dim for dim, _ in spec.sharded if dim < len(spec.shape) - 1]
    dim = max(leading, default=0)
    assert spec.shape[1:dim] == block.shape[1:dim], (spec, block)
    assert block.shape[-1] % BLOCK == 0 and math.prod(spec.shape) < MOST_BLOCKS * BLOCK, (spec, block)
    rows, whole_rows = (math.prod(shape[dim:-1]) for shape in (block.shape, spec.shape))
    first_row = sum(at * math.prod(spec.shape[d + 1 : -1]) for d, at in enumerate(block.offset[:-1]))
    begin, width, whole_width = (n // BLOCK for n in (piece.place.start, block.shape[-1], spec.shape[-1]))
    shift, first_block = piece.start // BLOCK - begin, block.offset[-1] // BLOCK
    halves = signed(key), signed(key >> 32)
    return begin, shift, width, rows, whole_width, whole_rows, first_row, first_block, *halves


class Noise:
    """Random bits for the elements of a flat slice that has whole blocks."""

    def __init__(self, seed: int, pieces: Sequence[NoisePiece], device: torch.device) -> None:
        self.seed = seed
        places = sorted(_place(seed, piece) for piece in pieces if piece.place.numel)
        places = places or [(1,) * 10]  # zeros are rounded to 0 by any bits
        self._table = torch.tensor(places, dtype=torch.int64).to(device)
        self._begins = self._table[:, 0].contiguous()
        self._steps = torch.arange(BLOCK, dtype=torch.int32, device=device).mul_(GOLDEN)

    def blocks(self, part: Range) -> torch.Tensor:
        """Return the numbers in their global tensors of the blocks of a part of the slice, and keys: [3, n] int64."""
        at = torch.arange(part.start // BLOCK, part.stop // BLOCK, device=self._table.device)
        table = self._table[torch.bucketize(at, self._begins, right=True) - 1].T
        _, shift, width, rows, whole_width, whole_rows, first_row, first_block, low, high = table
        local = at + shift
        row, block = local // width, local % width
        row = row // rows * whole_rows + row % rows + first_row
        return torch.stack([row * whole_width + block + first_block, low, high])

    def bits(self, part: Range, update: int) -> torch.Tensor:
        """Return 32 random bits for every element of a part of the slice in update number `update`; int32 [n].

        `Note [masks by coordinate]` in `engine.kernels.dropout` explains the two keys.
        """
        number, low, high = self.blocks(part).int()
        key = seed_of(self.seed, "moments", update)
        keys = torch.stack([number ^ low, number ^ high])  # [2, blocks]
        spare = torch.empty_like(keys)
        mix_(keys, spare)
        for half, each in zip(scalars(key, key >> 32), keys, strict=True):
            each.bitwise_xor_(half)
        a, b = mix_(keys, spare)
        x = a[:, None] + self._steps
        spare = torch.empty_like(x)
        round_(x, spare, *FIRST_ROUND).bitwise_xor_(b[:, None])
        round_(x, spare, *SECOND_ROUND)
        shift, low, _ = FIRST_ROUND
        return x.bitwise_xor_(torch.bitwise_right_shift(x, shift, out=spare).bitwise_and_(low)).view(-1)
