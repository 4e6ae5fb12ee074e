"""Add rows to a table at places that may repeat: the gradient of the token table.

Places are sorted and cut into pieces of SIZE. Equal places in a row are a *run*. A program sums the rows of a piece and
adds a run that is inside the piece to the table. A second launch adds runs that cover several pieces: one program per
run sums the parts in order. So a token that is in every sample costs no serial walk, as in torch's `index_put_`, there
are no atomics, and the bits are the same every time.
"""

import torch
import triton
import triton.language as tl

from megazero.engine.kernels.triton.triton_options import block_options

SIZE = 32  # places of a piece, the same on every GPU
BLOCK = 512  # columns of a program


@triton.jit
def _pieces(
    table, values, places, order, heads, tails, total, num_rows, columns, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """A piece and a block of columns per program.

    `heads` [pieces, columns]: sum over the run that began before the piece. `tails`: over the run that begins in the
    piece and ends after it.
    """
    piece = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    part = tl.cast(piece, tl.int64) * columns + column
    begin = piece * SIZE
    end = tl.minimum(begin + SIZE, total)
    before = tl.load(places + tl.maximum(begin - 1, 0))
    is_head = (begin > 0) & (before == tl.load(places + begin))
    summed = tl.zeros((BLOCK,), tl.float32)
    for at in range(begin, end):
        place = tl.load(places + at)
        following = tl.load(places + tl.minimum(at + 1, total - 1))
        goes_on = (at + 1 < total) & (following == place)
        ends = (at + 1 == end) | (following != place)  # the last row of the run in this piece
        is_ours = place < num_rows
        # a mask compares columns with their number: with 0 if there is nothing to do
        value = tl.load(
            values + tl.load(order + at) * columns + column, mask=column < tl.where(is_ours, columns, 0), other=0.0
        )
        summed += value.to(tl.float32)
        into = table + place * columns + column
        whole = column < tl.where(ends & is_ours & (is_head | goes_on), 0, tl.where(ends & is_ours, columns, 0))
        old = tl.load(into, mask=whole, other=0.0)
        tl.store(into, (old.to(tl.float32) + summed).to(old.dtype), mask=whole)
        tl.store(heads + part, summed, mask=column < tl.where(ends & is_head, columns, 0))
        tl.store(tails + part, summed, mask=column < tl.where(is_head, 0, tl.where(ends & goes_on, columns, 0)))
        summed = tl.where(column < tl.where(ends, 0, columns), summed, 0.0)
        is_head = is_head & (following == place)


@triton.jit
def _runs(table, places, heads, tails, total, num_rows, columns, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Per program: a block of columns of the run that begins in a piece and ends after it, if there is one."""
    piece = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin, end = piece * SIZE, (piece + 1) * SIZE  # not the last piece: end < total
    place = tl.load(places + end - 1)
    begins_here = (begin == 0) | (tl.load(places + tl.maximum(begin - 1, 0)) != place)
    goes_on = begins_here & (place < num_rows) & (tl.load(places + end) == place)
    mask = column < tl.where(goes_on, columns, 0)
    summed = tl.load(tails + tl.cast(piece, tl.int64) * columns + column, mask=mask, other=0.0)
    first = tl.where(goes_on, end, total)
    while first < total:
        summed += tl.load(heads + tl.cast(first // SIZE, tl.int64) * columns + column, mask=mask, other=0.0)
        after = first + SIZE
        first = tl.where(tl.load(places + tl.minimum(after, total - 1)) == place, after, total)
    into = table + place * columns + column
    old = tl.load(into, mask=mask, other=0.0)
    tl.store(into, (old.to(tl.float32) + summed).to(old.dtype), mask=mask)


def add_rows_(table: torch.Tensor, rows: torch.Tensor, mine: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """table [v, h] += values [T, h] at `rows` [T] where `mine`. Sums are in fp32."""
    (num_rows, columns), total = table.shape, len(rows)
    places = rows.masked_fill(~mine, num_rows)  # kernels skip places that are not in the table
    assert values.shape == (total, columns) and table.is_contiguous(), (table.shape, values.shape, places.shape)
    if total == 0:
        return table
    ordered, order = places.sort(stable=True)
    pieces = triton.cdiv(total, SIZE)
    parts = torch.empty(2, pieces, columns, dtype=torch.float32, device=table.device)
    options = {"SIZE": SIZE, **block_options(columns, BLOCK)}
    blocks = triton.cdiv(columns, options["BLOCK"])
    heads, tails = parts
    _pieces[(pieces, blocks)](
        table, values.contiguous(), ordered, order, heads, tails, total, num_rows, columns, **options
    )
    if pieces > 1:
        _runs[(pieces - 1, blocks)](table, ordered, heads, tails, total, num_rows, columns, **options)
    return table
