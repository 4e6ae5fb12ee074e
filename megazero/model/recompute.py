"""Selective recompute inside a block."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd.graph import saved_tensors_hooks


def through(
    prepare: Callable[[torch.Tensor], torch.Tensor],
    use: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    *,
    again: bool,
) -> torch.Tensor:
    """use(prepare(x)). With `again`, what `prepare` gave is not kept for the backward of `use`, but made again there.

    Worth it where `prepare` is cheap and keeps x for its own backward anyway: norms, GELU.
    """
    y = prepare(x)
    if not again:
        return use(y)
    source, same = x.detach(), (y.data_ptr(), y.shape, y.stride(), y.dtype)

    def pack(t: torch.Tensor) -> torch.Tensor | None:
        return None if (t.data_ptr(), t.shape, t.stride(), t.dtype) == same else t

    def unpack(kept: torch.Tensor | None) -> torch.Tensor:
        if kept is not None:
            return kept
        with torch.no_grad():
            return prepare(source)

    with saved_tensors_hooks(pack, unpack):
        return use(y)
