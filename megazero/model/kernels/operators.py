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
import torch.nn.functional as F

from megazero.model.kernels import eager
from megazero.model.kernels.dropout import Segment, scale_of, threshold_of
from megazero.model.kernels.fused_ops import GELU_A, GELU_B
from megazero.model.kernels.rotary import RotaryTables

DEVICES = ("CUDA", "CPU")
WIDEST = 8192  # a norm's row, which a program has in registers; of a wider one torch's operators take care


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


def _launch_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    from megazero.model.kernels import triton_norm

    return triton_norm.rms_norm(x, weight, eps)


def _rms_norm_stand_in(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)


def _launch_rms_norm_grad(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    from megazero.model.kernels import triton_norm

    return triton_norm.norm_grad(dy, x, weight, None, rstd, residual)[:2]


def _rms_norm_grad_stand_in(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(weight, dtype=torch.float32)


def _launch_layer_norm_grad(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    residual: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from megazero.model.kernels import triton_norm

    dx, dweight, dbias = triton_norm.norm_grad(dy, x, weight, mean, rstd, residual)
    assert dbias is not None
    return dx, dweight, dbias


def _layer_norm_grad_stand_in(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    made = torch.empty_like(weight, dtype=torch.float32)
    return torch.empty_like(x), made, torch.empty_like(made)


def _launch_swiglu(x: torch.Tensor) -> torch.Tensor:
    from megazero.model.kernels import triton_swiglu

    return triton_swiglu.swiglu(x)


def _swiglu_stand_in(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


def _launch_swiglu_grad_(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    from megazero.model.kernels import triton_swiglu

    return triton_swiglu.swiglu_grad_(dy, x)


def _swiglu_grad_stand_in(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x


def _launch_gelu_grad_(dy: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from megazero.model.kernels import triton_gelu

    return triton_gelu.gelu_grad_(dy, x, GELU_A, GELU_B)


def _gelu_grad_stand_in(dy: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return dy, x.new_empty(x.shape[-1], dtype=torch.float32)


def _launch_rotary_(*given: Any) -> None:
    from megazero.model.kernels import triton_rotary

    triton_rotary.launch(given[:3], given[3:6], *given[6:])


def _rotary_stand_in(*_: Any) -> None:
    return None


def _launch_add_rows_(
    table: torch.Tensor, rows: torch.Tensor, mine: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    from megazero.model.kernels import triton_rows

    return triton_rows.add_rows_(table, rows.masked_fill(~mine, len(table)), values)


def _add_rows_stand_in(table: torch.Tensor, *_: Any) -> torch.Tensor:
    return table


gelu_grad_ = _operator(
    "gelu_grad_(Tensor(a!) dy, Tensor x) -> (Tensor(a!), Tensor)", _launch_gelu_grad_, _gelu_grad_stand_in
)
_ROTARY = _operator(
    "rotary_(Tensor q, Tensor k, Tensor v, Tensor(a!) rotated_q, Tensor(b!) rotated_k, Tensor(c!) copied_v,"
    " Tensor cos, Tensor sin, Tensor? positions, bool back) -> ()",
    _launch_rotary_,
    _rotary_stand_in,
)
add_rows = _operator(
    "add_rows_(Tensor(a!) table, Tensor rows, Tensor mine, Tensor values) -> Tensor(a!)",
    _launch_add_rows_,
    _add_rows_stand_in,
)
_RMS_NORM = _operator(
    "rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)", _launch_rms_norm, _rms_norm_stand_in
)
_RMS_NORM_GRAD = _operator(
    "rms_norm_grad(Tensor dy, Tensor x, Tensor weight, Tensor rstd, Tensor? residual) -> (Tensor, Tensor)",
    _launch_rms_norm_grad,
    _rms_norm_grad_stand_in,
)
_LAYER_NORM_GRAD = _operator(
    "layer_norm_grad(Tensor dy, Tensor x, Tensor weight, Tensor mean, Tensor rstd, Tensor? residual)"
    " -> (Tensor, Tensor, Tensor)",
    _launch_layer_norm_grad,
    _layer_norm_grad_stand_in,
)
swiglu = _operator("swiglu(Tensor x) -> Tensor", _launch_swiglu, _swiglu_stand_in)
_SWIGLU_GRAD = _operator(
    "swiglu_grad_(Tensor dy, Tensor(a!) x) -> Tensor(a!)", _launch_swiglu_grad_, _swiglu_grad_stand_in
)


def swiglu_grad(dy: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, None]:
    """See `FusedOps`."""
    return _SWIGLU_GRAD(dy, x), None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """See `eager.rms_norm`."""
    return eager.rms_norm(x, weight, eps) if x.shape[-1] > WIDEST else _RMS_NORM(x, weight, eps)


def rms_norm_grad(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `eager.rms_norm_grad`; the weight's gradient is fp32."""
    make = eager.rms_norm_grad if x.shape[-1] > WIDEST else _RMS_NORM_GRAD
    return make(dy, x, weight, rstd, residual)


def layer_norm_grad(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `eager.layer_norm_grad`; the gradients of weight and bias are fp32."""
    if x.shape[-1] > WIDEST:
        return eager.layer_norm_grad(dy, x, weight, bias, mean, rstd, residual)
    return _LAYER_NORM_GRAD(dy, x, weight, mean, rstd, residual)


def loss_kept(factor: torch.Tensor, total: torch.Tensor, log_sum: torch.Tensor) -> torch.Tensor:
    """Return what turns logits into probabilities."""
    return log_sum


def dropout(
    x: torch.Tensor, residual: torch.Tensor | None, segments: Sequence[Segment], probability: float
) -> torch.Tensor:
    """See `model.kernels.dropout.eager`, whose bits these are. Not for fp64."""
    flat = [number for segment in segments for number in segment]
    return _DROPOUT(x, residual, flat, threshold_of(probability), scale_of(probability))


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Return torch's, which is one kernel."""
    return F.gelu(x, approximate="tanh")


def rotary(
    given: tuple[torch.Tensor, ...],
    results: tuple[torch.Tensor, ...],
    tables: RotaryTables,
    positions: torch.Tensor | None,
    back: bool,
) -> None:
    """See `eager.rotary`."""
    _ROTARY(*given, *results, tables.cos, tables.sin, positions, back)
