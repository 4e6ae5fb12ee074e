"""Shards: a rank's part of a globally named tensor."""

from dataclasses import dataclass
from math import prod
from typing import Self

import torch

from megazero.engine.plan.layout.flat_layout import Range
from megazero.engine.plan.layout.parameters import LocalBlock, ParamSpec


@dataclass(frozen=True, eq=False)
class LocalShard:
    """A rank's piece of a globally named tensor: the flat range [start, stop) of its row-major local block.

    Lengths and offsets are in elements. A rank that owns nothing of its block has `start == stop`. If several ranks
    hold the same shard (tensor-parallel replicas, ZeRO stage 0, a tied table), one of them writes it.
    """

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]  # first element of the local block in the global tensor
    local_shape: tuple[int, ...]  # shape of the local block (the tensor-parallel shard), padding excluded
    start: int  # the owned range of the local block (the ZeRO shard) begins here
    stop: int
    data: torch.Tensor  # [stop - start], contiguous; read by save, written in place by load

    def __post_init__(self) -> None:
        assert all(size > 0 for size in self.global_shape), self.global_shape
        assert all(
            0 <= o and o + n <= size
            for o, n, size in zip(self.offset, self.local_shape, self.global_shape, strict=True)
        ), self.geometry
        assert 0 <= self.start <= self.stop <= prod(self.local_shape), self.geometry
        assert self.data.shape == (self.stop - self.start,) and self.data.is_contiguous(), self.geometry

    @classmethod
    def of(cls, spec: ParamSpec, block: LocalBlock, owned: Range, data: torch.Tensor) -> Self:
        """Return the shard of a parameter that is `owned`, a flat range of the rank's block."""
        return cls(spec.shape, block.offset, block.shape, start=owned.start, stop=owned.stop, data=data)

    @property
    def geometry(self) -> tuple[object, ...]:
        """Everything but the data."""
        return self.global_shape, self.offset, self.local_shape, self.start, self.stop
