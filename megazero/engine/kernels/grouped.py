"""Products of rows with the matrices of their groups: tokens with the weights of their experts.

Rows are sorted by group. One grouped kernel of torch computes bf16 products on a GPU. Elsewhere each group is a product
of its own, for which the host must know the groups' sizes. On a CPU torch's kernel takes longer
(docs/results/experts.md).

Shapes: R rows, E groups.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F

from megazero.engine.kernels.matmul import Products, write_or_add

ALIGN = 8  # the grouped kernel needs widths that are multiples of 16 bytes


class RowGroups(NamedTuple):
    """Division of sorted rows into groups.

    Attributes:
        ends: the row at which each group ends, [E] int32.
        sizes: rows of each group, if the host knows them.
    """

    ends: torch.Tensor
    sizes: tuple[int, ...] | None

    @classmethod
    def of(cls, counts: torch.Tensor, sizes: tuple[int, ...] | None) -> Self:
        """counts [E] int64: rows of each group; sizes: the same on the host, or None."""
        return cls(counts.cumsum(0).to(torch.int32), sizes)

    @classmethod
    def one(cls, x: torch.Tensor) -> Self:
        """All rows of x [R, c] are one group."""
        return cls(torch.full((1,), len(x), dtype=torch.int32, device=x.device), (len(x),))

    def numbers(self, rows: int) -> torch.Tensor:
        """Return the group of each row, [R] int64."""
        at = torch.arange(rows, dtype=self.ends.dtype, device=self.ends.device)
        return torch.searchsorted(self.ends[:-1], at, right=True)

    def slices(self) -> Iterator[slice]:
        assert self.sizes is not None
        for begin, end in pairwise(itertools.accumulate(self.sizes, initial=0)):
            yield slice(begin, end)


def is_fused(dtype: torch.dtype, device: torch.device, *widths: int) -> bool:
    """Return whether torch's grouped kernel computes products of these widths."""
    return (
        device.type != "cpu"
        and dtype == torch.bfloat16
        and hasattr(F, "grouped_mm")
        and not any(width % ALIGN for width in widths)
    )


@dataclass(frozen=True)
class GroupedProducts:
    """The three products of E linear layers with sorted rows."""

    products: Products

    def output(self, x: torch.Tensor, weight: torch.Tensor, groups: RowGroups) -> torch.Tensor:
        """x [R, in], weight [E, out, in] -> [R, out]"""
        if groups.sizes is None:
            return F.grouped_mm(x, weight.transpose(1, 2), offs=groups.ends)
        out = x.new_empty(len(x), weight.shape[1])
        for rows, matrix in zip(groups.slices(), weight, strict=True):
            if rows.start < rows.stop:
                out[rows] = self.products.output(x[rows], matrix)
        return out

    def input_grad(self, dy: torch.Tensor, weight: torch.Tensor, groups: RowGroups) -> torch.Tensor:
        """dy [R, out], weight [E, out, in] -> [R, in]"""
        if groups.sizes is None:
            return F.grouped_mm(dy, weight, offs=groups.ends)
        out = dy.new_empty(len(dy), weight.shape[2])
        for rows, matrix in zip(groups.slices(), weight, strict=True):
            if rows.start < rows.stop:
                out[rows] = self.products.input_grad(dy[rows], matrix)
        return out

    def weight_grad(self, groups: RowGroups, x: torch.Tensor, dy: torch.Tensor, out: torch.Tensor, add: bool) -> None:
        """Write dy.T @ x of each group to out [E, out, in], or add it. A group without rows has the gradient 0."""
        out = out.view(len(groups.ends), dy.shape[1], x.shape[1])
        if groups.sizes is None:
            write_or_add(F.grouped_mm(dy.t(), x, offs=groups.ends), out, add)
            return
        for rows, gradient in zip(groups.slices(), out, strict=True):
            if rows.start < rows.stop:
                self.products.weight_grad(x[rows], dy[rows], gradient, add)
            elif not add:
                gradient.zero_()
