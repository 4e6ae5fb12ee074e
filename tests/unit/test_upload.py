"""Uploads to a pretended GPU: one copy, from page-locked memory of a size that torch's allocator cannot get wrong."""

from __future__ import annotations

import pytest
import torch

from megazero.memory.upload import upload
from tests.helpers.pretended_gpu import GPU, pretended_gpu

TENSORS = [torch.arange(5), torch.rand(3, 7), torch.rand(2, dtype=torch.float64), torch.zeros(1000, 33)]


def test_tensors_arrive_from_pinned_memory_of_a_power_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Note [pinned memory]: blocks of other sizes are handed out for larger requests."""
    pinned: list[int] = []
    empty = torch.empty

    def recorded(size: int, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory and dtype == torch.uint8
        pinned.append(size)
        return empty(size, dtype=dtype, pin_memory=pin_memory)

    for count, wanted in ((1, 64), (3, 256), (4, 1 << 18)):  # 40, 40 + 84 + 16 and 132,000 more bytes, each in 16s
        with pretended_gpu() as findings, monkeypatch.context() as patch:
            patch.setattr(torch, "empty", recorded)
            found = upload(TENSORS[:count], GPU)
            patch.undo()
            assert all(torch.equal(x.cpu(), y) for x, y in zip(found, TENSORS, strict=False))
        assert not findings.found and pinned.pop() == wanted and not pinned
