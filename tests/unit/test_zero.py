"""ZeRO without ranks."""

from __future__ import annotations

import torch

from megazero.zero.gradients import square_sum


def test_square_sum_is_exact_where_fp32_is_not() -> None:
    """See Note [norms in fp32]."""
    x = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0))
    exact = float(x.double().square().sum())
    assert abs(float(square_sum(x)) - exact) < 1e-8 * exact
    assert square_sum(x[:0]) == 0
    assert abs(float(square_sum(x.double())) - exact) < 1e-14 * exact
