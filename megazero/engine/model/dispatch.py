"""A micro-batch's choices of experts, and its rows on their way to them and back: sorted, and exchanged over `ep`.

A token has a row for each of its k experts. A rank sorts its rows by expert, so those of one rank's experts are
neighbours, and sends them by an all-to-all. The receiver sorts them again, because every rank has sent some for each of
its experts.

Shapes: b micro-batch, T tokens, k experts of a token, R rows of this rank: T k less dropped choices, R' rows
that its experts receive, E experts, p ranks of ep; c any width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from megazero.engine.kernels.eager import is_stand_in
from megazero.engine.kernels.grouped import RowGroups
from megazero.engine.memory.tracker import Allocation, MemoryTracker
from megazero.engine.mesh.collectives import AsyncTensor, Axis, Pending


class SortedRows(NamedTuple):
    """The rows of this rank's tokens, by expert."""

    order: torch.Tensor  # row -> its place among the choices [T, k] of all tokens
    shape: torch.Size  # T, k

    @classmethod
    def of(cls, ids: torch.Tensor, dispatch: Dispatch) -> SortedRows:
        """ids [T, k]: see `Choices`"""
        return cls(ids.flatten().argsort(stable=True)[: sum(dispatch.sends)], ids.shape)  # dropped choices are last

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, c] -> [R, c]"""
        return x.index_select(0, self.order // self.shape[1])

    def choices(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, k] -> [R]"""
        return x.flatten().index_select(0, self.order)

    def unsorted(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [R, ..] -> [T, k, ..]; 0 of dropped choices"""
        whole = self.shape.numel()
        new = rows.new_empty if len(rows) == whole else rows.new_zeros
        return new(whole, *rows.shape[1:]).index_copy_(0, self.order, rows).view(*self.shape, *rows.shape[1:])


class Dispatch(NamedTuple):
    """The exchange of a micro-batch's rows over `ep`."""

    axis: Axis
    sends: list[int]  # rows to each rank
    receives: list[int]  # rows from each rank
    groups: RowGroups  # the received rows, by expert of this rank
    # rows that each rank sends to each expert of this rank, [p, E / p] int64; None: rows stay on their rank
    table: torch.Tensor | None

    @classmethod
    def of(cls, axis: Axis, ids: torch.Tensor, experts: int, most: int, on_host: bool) -> Dispatch:
        """Agree on the numbers of rows.

        Args:
            ids: the experts of tokens, [T, k] int64; see `Choices`.
            experts: of the layer.
            most: rows that experts have room for, of T tokens of each rank. If it is less than T E, the host waits for
                the number of rows.
            on_host: the products need the sizes of groups on the host. An exchange always does: the host waits once.
        """
        flat, pretends = ids.flatten(), axis.pretended
        counts = flat.new_zeros(2 * experts).scatter_add_(0, flat, torch.ones_like(flat))[:experts]
        total = min(len(flat), most)  # a trace routes this many rows
        if not axis.peers:
            sizes = _sizes(counts, total, pretends) if on_host or most < len(ids) * experts else None
            rows = len(flat) if sizes is None else sum(sizes)
            return cls(axis, [rows], [rows], RowGroups.of(counts, sizes if on_host else None), table=None)
        table, each = torch.empty_like(counts).view(axis.size, -1), experts // axis.size
        axis.start_all_to_all(counts.view_as(table), table, *[[1] * axis.size] * 2).wait()
        both = _sizes(torch.stack([counts, table.flatten()]), total, pretends)
        sent, received = both[:experts], both[experts:]
        if pretends:
            received = _even(min(round(axis.imbalance * len(flat)), most), experts)
            table.copy_(torch.tensor(received).view_as(table))
        sends, receives = ([sum(sizes[i : i + each]) for i in range(0, experts, each)] for sizes in (sent, received))
        sizes = tuple(sum(received[i::each]) for i in range(each)) if on_host else None
        return cls(axis=axis, sends=sends, receives=receives, groups=RowGroups.of(table.sum(0), sizes), table=table)

    def order(self) -> torch.Tensor | None:
        """Return the order of `arranged`; None if rows stay on their rank."""
        if self.table is None:
            return None
        local = torch.arange(self.table.shape[1], device=self.table.device).repeat(self.axis.size)
        arrived = local.repeat_interleave(self.table.flatten(), output_size=sum(self.receives))
        return arrived.argsort(stable=True)

    def start(self, rows: torch.Tensor) -> AsyncTensor:
        """rows [R, ..] -> [R', ..], at the ranks of their experts"""
        return self._start(rows, self.sends, self.receives)

    def start_back(self, rows: torch.Tensor) -> AsyncTensor:
        """rows [R', ..] -> [R, ..], at the ranks of their tokens"""
        return self._start(rows, self.receives, self.sends)

    def _start(self, rows: torch.Tensor, sends: list[int], receives: list[int]) -> AsyncTensor:
        if self.table is None:
            return AsyncTensor(rows, Pending())
        out = rows.new_empty(sum(receives), *rows.shape[1:])
        return AsyncTensor(out, self.axis.start_all_to_all(rows, out, sends, receives))


class Choices(NamedTuple):
    """The experts that tokens pass."""

    # [T, k] int16; E more than the expert's number if it has no room for the choice, which is dropped
    ids: torch.Tensor
    # choices of each expert in each whole sample, [b, E]; None: there is no loss that needs them
    counts: torch.Tensor | None
    dispatch: Dispatch  # the way of their rows to the experts


@dataclass(frozen=True)
class Balance:
    """The choices of a training step's micro-batch, and the numbers with which balance losses enter the objective."""

    targets: torch.Tensor  # of each whole sample, [b] fp64
    seed: torch.Tensor  # d objective / d loss, a scalar in fp64; see `Interpreter.run`
    _kept: dict[int, tuple[Choices, Allocation]] = field(default_factory=dict)

    def keep(self, layer: int, choices: Choices, tracker: MemoryTracker) -> None:
        """Keep the choices of a layer's Forward, so that its Recompute makes the same."""
        parts = choices.ids, choices.counts, choices.dispatch.table
        num_bytes = sum(part.nbytes for part in parts if part is not None)
        self._kept[layer] = choices, tracker.allocate("activation_checkpoints", num_bytes)

    def take(self, layer: int) -> Choices | None:
        """Return kept choices, once."""
        choices, _ = self._kept.pop(layer, (None, None))
        return choices


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
