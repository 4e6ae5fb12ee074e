"""The operators of torch 2.11, the oldest torch that pyproject.toml allows, that differ from those of later ones.

`make test-oldest` runs the suite with torch 2.11 itself.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen

from megazero.torch_private import TorchDispatchMode, grouped


class _NoWideSums(TorchDispatchMode):
    """Stand-ins of 2.11 add no 16-bit product to a wider tensor: they take the type of the sum for its factor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.addmm.dtype, torch.ops.aten.addmm.dtype_out) and args[0].is_meta:
            raise TypeError("unsupported operand type(s) for *: 'torch.dtype' and 'Tensor'")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def oldest_torch(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a newer torch refuse the calls that 2.11 refuses."""
    later, added = varlen.varlen_attn, grouped(varlen.varlen_attn)

    def varlen_attn(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor,
        max_q: int,
        max_k: int,
        *,
        return_aux: Any = None,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Any:
        limits = cu_seq_q, cu_seq_k, max_q, max_k
        return later(query, key, value, *limits, scale=scale, window_size=window_size, **added)

    patch.setattr(varlen, "varlen_attn", varlen_attn)
    with _NoWideSums():
        yield
