"""Interprets a stage's plan: computes, sends, receives. Knows nothing of ZeRO.

Between its forward and its backward a micro-batch is held by one scalar token, never by the stage's input or output:
a stage's graph begins in `_Enter`, which keeps nothing and catches the input's gradient, and ends in `_Leave`, whose
backward returns the gradient that was received. Keeping whole inputs and outputs would undo partitioned activations.

Shapes: T' tokens, h hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

from megazero.comm.collectives import Axis
from megazero.memory.tracker import Lease, Ledger
from megazero.plan.schedules import PEER, Action, Op, Plan, steps


class Stage(Protocol):
    """One rank's part of the model."""

    def forward(self, x: torch.Tensor | None, micro_batch: Any) -> torch.Tensor:
        """The stage's output [T', h], or on the last stage the loss, a scalar. x is None on the first stage."""

    def backward(self, final: bool) -> AbstractContextManager[None]:
        """Around a backward; `final`: the last one of this stage in the iteration."""


class Message(NamedTuple):
    """What travels between stages: [T', h], a micro-batch's tokens on this tensor-parallel rank."""

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device


class _Enter(torch.autograd.Function):
    """`anchor` only makes the output require a gradient."""

    @staticmethod
    def forward(ctx, x, anchor, caught):
        ctx.caught = caught
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        ctx.caught["dx"] = dx.contiguous()
        return None, None, None


class _Leave(torch.autograd.Function):
    """Hands its input to the sender; a scalar stands for it."""

    @staticmethod
    def forward(ctx, y, caught):
        ctx.caught = caught
        caught["x"] = y.detach()
        return y.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        return ctx.caught.pop("dy"), None


class _Transfers:
    """Messages to be sent and messages received, each counted in the ledger while it is here."""

    def __init__(self, message: Message, axis: Axis, ledger: Ledger) -> None:
        self.message, self.axis, self.ledger = message, axis, ledger
        self.held: dict[tuple[Op, int], tuple[torch.Tensor, Lease]] = {}

    def put(self, op: Op, micro_batch: int, x: torch.Tensor) -> None:
        assert x.shape == self.message.shape, (x.shape, self.message.shape)
        lease = self.ledger.lease("buffers", x.numel() * x.element_size())
        self.held[op, micro_batch] = x, lease

    def take(self, op: Op, micro_batch: int) -> torch.Tensor:
        x, lease = self.held.pop((op, micro_batch))
        lease.end()
        return x

    def exchange(self, transfers: Sequence[Action]) -> None:
        """One batch of adjacent transfers."""
        receives, sends = [], []
        for op, i, _ in transfers:
            if op in (Op.RECV_X, Op.RECV_DX):
                shape, dtype, device = self.message
                self.put(op, i, torch.empty(shape, dtype=dtype, device=device))
                receives.append((self.held[op, i][0], PEER[op][0]))
            else:
                sends.append((self.held[op, i][0], PEER[op][0]))
        self.axis.exchange(sends, receives)
        for op, i, _ in transfers:
            if op in (Op.SEND_X, Op.SEND_DX):
                self.take(op, i)


def run(
    plan: Plan,
    stage: Stage,
    micro_batches: Sequence[Any],
    axis: Axis,
    message: Message,
    ledger: Ledger,
    seed_gradient: float,
) -> torch.Tensor:
    """Carry out a stage's plan.

    Args:
        seed_gradient: d objective / d loss, of every micro-batch.

    Returns:
        The sum of the micro-batches' losses, a scalar in fp64; 0 on all stages but the last.
    """
    transfers = _Transfers(message, axis, ledger)
    tokens: dict[int, tuple[torch.Tensor, dict[str, torch.Tensor]]] = {}
    anchor = torch.zeros((), device=message.device, requires_grad=True)
    loss_sum = torch.zeros((), dtype=torch.float64, device=message.device)
    for batch in steps(plan):
        op, i, final = batch[0]
        if op is Op.FORWARD:
            caught: dict[str, torch.Tensor] = {}
            x = None if axis.is_first else _Enter.apply(transfers.take(Op.RECV_X, i), anchor, caught)
            y = stage.forward(x, micro_batches[i])
            if axis.is_last:
                loss_sum += y.detach()
                tokens[i] = y, caught
            else:
                tokens[i] = _Leave.apply(y, caught), caught
                transfers.put(Op.SEND_X, i, caught.pop("x"))
            del x, y  # or the last pair lives on
        elif op is Op.BACKWARD:
            token, caught = tokens.pop(i)
            if not axis.is_last:
                caught["dy"] = transfers.take(Op.RECV_DX, i)
            with stage.backward(final):
                token.backward(torch.full_like(token, seed_gradient))
            del token
            if not axis.is_first:
                transfers.put(Op.SEND_DX, i, caught.pop("dx"))
        else:
            transfers.exchange(batch)
    return loss_sum
