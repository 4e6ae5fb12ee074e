"""ZeRO without ranks."""

from __future__ import annotations

import torch

from megazero.engine.zero.norms import square_sums
from tests.helpers.rounding import error_bound


def test_square_sum_is_exact_where_fp32_is_not() -> None:
    """See Note [norms in fp32]."""
    x = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0))
    exact = float(x.double().square().sum())
    cpu = torch.device("cpu")
    for pieces in ([x], list(x.split([1 << 20, 64, (3 << 20) - 64]))):
        found = float(square_sums([pieces], cpu))
        assert abs(found - exact) < error_bound(exact, 64, torch.float32)  # rows of 64 in fp32
    assert square_sums([[], [x]], cpu)[0] == 0
    assert abs(float(square_sums([[x.double()]], cpu)) - exact) < error_bound(exact, 2 * 64, torch.float64)
