"""ZeRO without ranks."""

from __future__ import annotations

import torch

from megazero.zero.gradients import square_sum
from tests.helpers.rounding import error_bound


def test_square_sum_is_exact_where_fp32_is_not() -> None:
    """See Note [norms in fp32]."""
    x = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0))
    exact = float(x.double().square().sum())
    assert abs(float(square_sum(x)) - exact) < error_bound(exact, 64, torch.float32)  # rows of 64 in fp32
    assert square_sum(x[:0]) == 0
    assert abs(float(square_sum(x.double())) - exact) < error_bound(exact, 2 * 64, torch.float64)
