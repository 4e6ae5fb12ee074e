"""Rows of tokens on their way to their experts and back: sorted by expert, and exchanged over the ranks of `ep`.

A token has a row for each of its k experts. A rank sorts its rows by expert, so those of one rank's experts are
neighbours, and sends them by an all-to-all. The receiver sorts them again, because every rank has sent some for each of
its experts.

Shapes: T tokens, k experts of a token, R = T k rows of this rank, R' rows that its experts receive, E experts, p ranks
of ep; c any width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megazero.comm.mesh.collectives import AsyncTensor, Axis, Pending
from megazero.kernels.eager import is_stand_in
from megazero.kernels.grouped import RowGroups


class SortedRows(NamedTuple):
    """The rows of this rank's tokens, by expert.

    Attributes:
        order: row -> its place among the choices [T, k] of all tokens.
        top: k
    """

    order: torch.Tensor
    top: int

    @classmethod
    def of(cls, ids: torch.Tensor) -> SortedRows:
        """ids [T, k]: the tokens' experts"""
        return cls(ids.flatten().argsort(stable=True), ids.shape[1])

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, c] -> [R, c]"""
        return x.index_select(0, self.order // self.top)

    def choices(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, k] -> [R]"""
        return x.flatten().index_select(0, self.order)

    def unsorted(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [R] -> [T, k]"""
        return torch.empty_like(rows).index_copy_(0, self.order, rows).view(-1, self.top)

    def sum_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [R, c] -> [T, c], summed over a token's experts in the order of its choices"""
        return torch.empty_like(rows).index_copy_(0, self.order, rows).view(-1, self.top, rows.shape[1]).sum(1)


class Dispatch(NamedTuple):
    """The exchange of a micro-batch's rows over `ep`.

    Attributes:
        sends, receives: rows to and from each rank.
        groups: the received rows, by expert of this rank.
        table: rows that each rank sends to each expert of this rank, [p, E / p] int64; None: rows stay on their rank.
    """

    axis: Axis
    sends: list[int]
    receives: list[int]
    groups: RowGroups
    table: torch.Tensor | None

    @classmethod
    def of(cls, axis: Axis, ids: torch.Tensor, experts: int, on_host: bool) -> Dispatch:
        """Agree on the numbers of rows.

        Args:
            ids: the experts of tokens, [T, k] int64.
            experts: of the layer.
            on_host: the products need the sizes of groups on the host. An exchange always does: the host waits once.
        """
        flat = ids.flatten()
        counts, pretends = flat.new_zeros(experts).scatter_add_(0, flat, torch.ones_like(flat)), axis.pretended
        if not axis.peers:
            sizes = _sizes(counts, len(flat), pretends) if on_host else None
            return cls(axis, [len(flat)], [len(flat)], RowGroups.of(counts, sizes), None)
        table, each = torch.empty_like(counts).view(axis.size, -1), experts // axis.size
        axis.start_all_to_all(counts.view_as(table), table, *[[1] * axis.size] * 2).wait()
        both = _sizes(torch.stack([counts, table.flatten()]), len(flat), pretends)
        sent, received = both[:experts], both[experts:]
        if pretends:
            received = _even(round(axis.imbalance * len(flat)), experts)
            table.copy_(torch.tensor(received).view_as(table))
        sends, receives = ([sum(sizes[i : i + each]) for i in range(0, experts, each)] for sizes in (sent, received))
        sizes = tuple(sum(received[i::each]) for i in range(each)) if on_host else None
        return cls(axis, sends, receives, RowGroups.of(table.sum(0), sizes), table)

    def order(self) -> torch.Tensor | None:
        """Return the order of `arranged`; None if rows stay on their rank."""
        if self.table is None:
            return None
        local = torch.arange(self.table.shape[1], device=self.table.device).repeat(self.axis.size)
        arrived = local.repeat_interleave(self.table.flatten(), output_size=sum(self.receives))
        return arrived.argsort(stable=True)

    def start(self, rows: torch.Tensor) -> AsyncTensor:
        """rows [R, ..] -> [R', ..], at the ranks of their experts"""
        if self.table is None:
            return AsyncTensor(rows, Pending())
        out = rows.new_empty(sum(self.receives), *rows.shape[1:])
        return AsyncTensor(out, self.axis.start_all_to_all(rows, out, self.sends, self.receives))

    def start_back(self, rows: torch.Tensor) -> AsyncTensor:
        """rows [R', ..] -> [R, ..], at the ranks of their tokens"""
        if self.table is None:
            return AsyncTensor(rows, Pending())
        out = rows.new_empty(sum(self.sends), *rows.shape[1:])
        return AsyncTensor(out, self.axis.start_all_to_all(rows, out, self.receives, self.sends))


def arranged(rows: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """rows [R', ..] as they arrived -> sorted by expert"""
    return rows if order is None else rows.index_select(0, order)


def as_arrived(rows: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """The reverse of `arranged`."""
    return rows if order is None else torch.empty_like(rows).index_copy_(0, order, rows)


def _sizes(counts: torch.Tensor, total: int, pretends: bool) -> tuple[int, ...]:
    """Return the values of counts [.., E]; of a trace or a rehearsal as even ones as possible, whose sum is `total`."""
    if pretends or is_stand_in(counts):
        return _even(total, counts.shape[-1]) * (counts.numel() // counts.shape[-1])
    return tuple(counts.flatten().tolist())


def _even(total: int, parts: int) -> tuple[int, ...]:
    each, more = divmod(total, parts)
    return tuple(each + (i < more) for i in range(parts))
