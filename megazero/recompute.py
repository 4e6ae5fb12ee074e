"""Activation checkpointing. Where a block's kept input lives is a (pack, unpack) pair: whole, or partitioned (Pa).

torch's non-reentrant checkpoint calls pack exactly once per block and micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megazero.ledger import Lease, Ledger
from megazero.mesh import Axis


class Kept(NamedTuple):
    """A packed input; its lease ends when autograd lets go of it."""

    part: torch.Tensor
    shape: torch.Size
    lease: Lease


class Keep(NamedTuple):
    pack: Callable[[torch.Tensor], Any]
    unpack: Callable[[Any], torch.Tensor]


def keep_whole(ledger: Ledger) -> Keep:
    """Each rank keeps the whole input."""

    def pack(x: torch.Tensor) -> Kept:
        return Kept(x.detach(), x.shape, _lease(ledger, x))

    return Keep(pack, lambda kept: kept.part)


def keep_partitioned(ledger: Ledger, tp: Axis) -> Keep:
    """Pa: each tensor-parallel rank keeps 1/tp of the input, which is the same on all of them, and gathers it back.

    Sizes that tp does not divide are padded: the last rank keeps less, and gathers as much.
    """

    def pack(x: torch.Tensor) -> Kept:
        flat = x.detach().reshape(-1)
        each = partition_numel(flat.numel(), tp.size)
        part = flat[tp.rank * each : (tp.rank + 1) * each]
        if part.numel() < each:
            part = torch.cat([part, part.new_zeros(each - part.numel())])
        else:
            part = part.clone()
        return Kept(part, x.shape, _lease(ledger, part))

    def unpack(kept: Kept) -> torch.Tensor:
        whole = tp.all_gather(kept.part, kept.part.new_empty(kept.part.numel() * tp.size))
        return whole[: kept.shape.numel()].view(kept.shape)

    return Keep(pack, unpack)


def partition_numel(numel: int, size: int) -> int:
    """Elements that each of `size` ranks keeps of `numel`."""
    return -(-numel // size)


def _lease(ledger: Ledger, part: torch.Tensor) -> Lease:
    return ledger.lease("activation_checkpoints", part.numel() * part.element_size())


def recomputed(fn: Callable[..., torch.Tensor], *args: Any, keep: Keep) -> torch.Tensor:
    """fn(*args), keeping only its tensor arguments, by `keep`, and computing it again in backward."""
    with saved_tensors_hooks(*keep):
        return checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=False)
