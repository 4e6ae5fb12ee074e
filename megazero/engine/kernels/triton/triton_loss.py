"""The loss over the vocabulary in two passes over the logits: sums, and the gradient in place of the logits.

Both map the products of hidden states and the output matrix to logits; see `eager.LogitMap`. Bytes per logit of w
bytes: w and 2 w. All is computed in fp32, and rounded once, when the gradient is written.
"""

import torch
import triton
import triton.language as tl

from megazero.engine.kernels.triton.triton_options import block_options

BLOCK = 4096  # columns of a turn
LOWEST = tl.constexpr(-3.4028234663852886e38)  # least fp32 number; not -inf, from which -inf cannot be subtracted


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))


@triton.jit
def _sums(
    logits, labels, peaks, sums, rows, width, num_columns, factor, softcap, CAPPED: tl.constexpr, BLOCK: tl.constexpr
):
    """A row of logits [rows, width] per program; columns from num_columns on are padding.

    Loads are masked by the width, not by num_columns, because the width is a multiple of 16: so they are vectorized.
    """
    row = tl.program_id(0)
    start = row.to(tl.int64) * width
    peak = tl.full((), LOWEST, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(logits + start + column, mask=column < width, other=0.0).to(tl.float32) * factor
        if CAPPED:
            value = softcap * _tanh(value / softcap)
        value = tl.where(column < num_columns, value, float("-inf"))
        higher = tl.maximum(peak, tl.max(value, 0))
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(value - higher), 0)
        peak = higher
    label = tl.load(labels + row)
    mine = (label >= 0) & (label < num_columns)
    picked = tl.load(logits + start + label, mask=mine, other=0.0).to(tl.float32) * factor
    if CAPPED:
        picked = softcap * _tanh(picked / softcap)
    tl.store(peaks + row, peak)
    tl.store(sums + row, total)
    tl.store(sums + rows + row, picked)


@triton.jit
def _grad(
    logits, labels, log_sums, scales, width, num_columns, factor, softcap, CAPPED: tl.constexpr, BLOCK: tl.constexpr
):
    """A row per program: the gradient of the products, and 0 in the padding."""
    row = tl.program_id(0)
    start = row.to(tl.int64) * width
    log_sum = tl.load(log_sums + row)
    scale = tl.load(scales + row) * factor
    label = tl.load(labels + row)
    # another rank's label may be the number of a column of padding
    label = tl.where(label < num_columns, label, -1).to(tl.int32)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(logits + start + column, mask=column < width, other=0.0)
        logit = value.to(tl.float32) * factor
        if CAPPED:
            tanh = _tanh(logit / softcap)
            logit = softcap * tanh
        probability = tl.where(column < num_columns, tl.exp(logit - log_sum), 0.0)
        grad = (probability - tl.where(column == label, 1.0, 0.0)) * scale
        if CAPPED:
            grad *= 1.0 - tanh * tanh
        tl.store(logits + start + column, grad.to(value.dtype), mask=column < width)


def loss_sums(
    logits: torch.Tensor, labels: torch.Tensor, num_columns: int, factor: float, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `LossKernels`."""
    rows, width = logits.shape
    assert logits.is_contiguous() and labels.is_contiguous() and labels.shape == (rows,), (logits.shape, labels.shape)
    assert num_columns <= width < 1 << 30, (num_columns, width)
    peaks = torch.empty(rows, dtype=torch.float32, device=logits.device)
    found = torch.empty(2, rows, dtype=torch.float32, device=logits.device)
    if rows:
        options = {"CAPPED": softcap > 0, **block_options(width, BLOCK)}
        _sums[(rows,)](logits, labels, peaks, found, rows, width, num_columns, factor, softcap, **options)
    return peaks, found


def loss_grad_(
    logits: torch.Tensor,
    labels: torch.Tensor,
    num_columns: int,
    log_sum: torch.Tensor,
    scale: torch.Tensor,
    factor: float,
    softcap: float,
) -> torch.Tensor:
    """See `LossKernels`; `log_sum` is its `kept`."""
    rows, width = logits.shape
    assert logits.is_contiguous() and labels.is_contiguous(), (logits.stride(), labels.stride())
    assert log_sum.shape == scale.shape == labels.shape == (rows,), (log_sum.shape, scale.shape)
    assert log_sum.dtype == scale.dtype == torch.float32, (log_sum.dtype, scale.dtype)
    if rows:
        numbers = log_sum.contiguous(), scale.contiguous()
        options = {"CAPPED": softcap > 0, **block_options(width, BLOCK)}
        _grad[(rows,)](logits, labels, *numbers, width, num_columns, factor, softcap, **options)
    return logits
