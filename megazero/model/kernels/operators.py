"""Triton kernels as operators of torch.

An operator has a schema, an implementation that launches its kernel, and one for stand-ins, which makes tensors of the
same shapes and types without data. So a trace finds an operator's name and the bytes that it reads and writes, and a
plan for GPUs needs no triton: that is imported at the first launch.

An implementation runs below autograd: these operators are called inside autograd Functions alone. It is registered for
CPUs too, where kernels run in Triton's interpreter (TRITON_INTERPRET=1) and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megazero.model.dropout import Segment, scale_of, threshold_of

DEVICES = ("CUDA", "CPU")


def _operator(schema: str, launch: Callable[..., Any], stand_in: Callable[..., Any]) -> Any:
    """Register an operator; returns it."""
    name = f"megazero::{schema.partition('(')[0]}"
    torch.library.define(name, schema[schema.index("(") :])
    torch.library.impl(name, DEVICES, launch)
    torch.library.impl(name, "Meta", stand_in)
    return getattr(torch.ops.megazero, name.partition("::")[2]).default


def _launch_dropout(
    x: torch.Tensor, residual: torch.Tensor | None, segments: list[int], last: int, factor: float
) -> torch.Tensor:
    from megazero.model.kernels import triton_dropout

    return triton_dropout.launch(x, residual, segments, last, factor)


def _dropout_stand_in(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_DROPOUT = _operator(
    "dropout(Tensor x, Tensor? residual, int[] segments, int last, float factor) -> Tensor",
    _launch_dropout,
    _dropout_stand_in,
)


def _launch_sums(logits: torch.Tensor, labels: torch.Tensor, num_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    from megazero.model.kernels import triton_loss

    return triton_loss.sums(logits, labels, num_columns)


def _sums_stand_in(logits: torch.Tensor, labels: torch.Tensor, num_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    peaks = logits.new_empty(len(logits), dtype=torch.float32)
    return peaks, peaks.new_empty(2, len(logits))


def _launch_grad_(
    logits: torch.Tensor, labels: torch.Tensor, num_columns: int, log_sum: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    from megazero.model.kernels import triton_loss

    return triton_loss.grad_(logits, labels, num_columns, log_sum, scale)


def _grad_stand_in(logits: torch.Tensor, *_: Any) -> torch.Tensor:
    return logits


loss_sums = _operator(
    "loss_sums(Tensor logits, Tensor labels, int num_columns) -> (Tensor, Tensor)", _launch_sums, _sums_stand_in
)
loss_grad_ = _operator(
    "loss_grad_(Tensor(a!) logits, Tensor labels, int num_columns, Tensor log_sum, Tensor scale) -> Tensor(a!)",
    _launch_grad_,
    _grad_stand_in,
)


def loss_kept(factor: torch.Tensor, total: torch.Tensor, log_sum: torch.Tensor) -> torch.Tensor:
    """Return what turns logits into probabilities."""
    return log_sum


def dropout(
    x: torch.Tensor, residual: torch.Tensor | None, segments: Sequence[Segment], probability: float
) -> torch.Tensor:
    """See `model.dropout.eager`, whose bits these are. Not for fp64."""
    flat = [number for segment in segments for number in segment]
    return _DROPOUT(x, residual, flat, threshold_of(probability), scale_of(probability))
