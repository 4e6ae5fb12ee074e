"""Triton's kernels against torch's operators: on a GPU, or on a CPU in Triton's interpreter (tests/conftest.py).

The interpreter takes some 10 ms per program: there, sizes are tiny. It rounds to bf16 towards zero, where a GPU rounds
to the nearest: so bf16 is equal to one unit of the last place on a CPU, and to the bit on a GPU.
"""

from __future__ import annotations

import torch

from megazero.model.dropout import Dropout, Rows
from megazero.model.kernels.table import EAGER, TRITON


def randn(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def assert_rounded_alike(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal to the bit; in bf16 on a CPU to one unit of the last place, see above."""
    assert found.shape == wanted.shape and found.dtype == wanted.dtype and found.is_contiguous()
    units = found.view(torch.int16 if found.element_size() == 2 else torch.int32).int() - wanted.view(
        torch.int16 if wanted.element_size() == 2 else torch.int32
    )
    truncates = found.dtype == torch.bfloat16 and found.device.type == "cpu"
    assert int(units.abs().max()) <= int(truncates), int(units.abs().max())


def check_dropout(
    rows: tuple[Rows, ...], columns: int, dtype: torch.dtype, device: str, probability: float = 0.3
) -> None:
    """Compare masks, values, sums with a residual, and the gradients of both."""
    eager, triton = (Dropout(probability, 1234, 2, "mlp", k.dropout) for k in (EAGER, TRITON))
    count = sum(r.count for r in rows)
    x, residual, dy = (randn(count, columns, dtype=dtype, device=device, seed=i) for i in range(3))
    masks = triton.mask(x, rows), eager.mask(x, rows)
    assert torch.equal(masks[0] == 0, masks[1] == 0)
    assert_rounded_alike(*masks)
    assert_rounded_alike(triton(x.t().contiguous().t(), rows), eager(x, rows))  # strides do not matter
    leaves = x.clone().requires_grad_(), residual.clone().requires_grad_()
    y = triton(leaves[0], rows, leaves[1])
    # rounded twice, so that in bf16 on a CPU both roundings may differ
    if dtype != torch.bfloat16 or device != "cpu":
        assert_rounded_alike(y.detach(), eager(x, rows, residual))
    dx, dresidual = torch.autograd.grad(y, leaves, dy)
    assert_rounded_alike(dx, eager.times(dy, rows))
    assert torch.equal(dresidual, dy)


def check_large_dropout(device: str) -> None:
    """More than 2^31 elements: the mask of the last rows is that of these rows alone."""
    columns, count = 1 << 16, (1 << 15) + 8
    dropout = Dropout(0.3, 1234, 2, "mlp", TRITON.dropout)
    x = torch.ones(count, columns, dtype=torch.bfloat16, device=device)
    y = dropout(x, (Rows(5, 0, count),))
    assert torch.equal(y[-8:], Dropout(0.3, 1234, 2, "mlp", EAGER.dropout)(x[-8:], (Rows(5, count - 8, 8),)))
