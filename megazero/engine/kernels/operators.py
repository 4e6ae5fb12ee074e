"""Triton kernels as operators of torch.

Each operator has a schema, the launch of its kernel, and a stand-in, which returns tensors of the same shapes and types
without data. So a trace finds the operator's name and the bytes that it reads and writes. A plan for GPUs does not need
triton, because the launches are imported when the first one runs.

These operators run below autograd: only autograd Functions call them. They are registered for CPUs too, where Triton's
interpreter runs the kernels (TRITON_INTERPRET=1).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megazero.engine.kernels import eager
from megazero.engine.kernels.dropout import Segment, scale_of, threshold_of
from megazero.engine.kernels.eager import PRODUCTS, LogitMap
from megazero.engine.kernels.rotary import RotaryTables

DEVICES = ("CUDA", "CPU")
WIDEST = 8192  # columns of a norm whose row fits into a program's registers; torch's operators compute wider ones


def _operator(schema: str, stand_in: Callable[..., Any]) -> Any:
    """Register and return the operator that the function of its name in `triton_launches` implements."""
    name, _, signature = schema.partition("(")

    def launch(*given: Any) -> Any:
        from megazero.engine.kernels.triton import triton_launches

        return getattr(triton_launches, name)(*given)

    torch.library.define(f"megazero::{name}", f"({signature}")
    torch.library.impl(f"megazero::{name}", DEVICES, launch)
    torch.library.impl(f"megazero::{name}", "Meta", stand_in)
    return getattr(torch.ops.megazero, name).default


def _fp32(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return like.new_empty(shape, dtype=torch.float32)


_DROPOUT = _operator(
    "dropout(Tensor x, Tensor? residual, int[] segments, int last, float factor) -> Tensor",
    lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
)
_RMS_NORM = _operator(
    "rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    lambda x, *_: (torch.empty_like(x), _fp32(x, *x.shape[:-1], 1)),
)
_RMS_NORM_GRAD = _operator(
    "rms_norm_grad(Tensor dy, Tensor x, Tensor weight, Tensor rstd, Tensor? residual) -> (Tensor, Tensor)",
    lambda dy, x, *_: (torch.empty_like(x), _fp32(x, x.shape[-1])),
)
_LAYER_NORM_GRAD = _operator(
    "layer_norm_grad(Tensor dy, Tensor x, Tensor weight, Tensor mean, Tensor rstd, Tensor? residual)"
    " -> (Tensor, Tensor, Tensor)",
    lambda dy, x, *_: (torch.empty_like(x), _fp32(x, x.shape[-1]), _fp32(x, x.shape[-1])),
)
_SWIGLU_GRAD = _operator("swiglu_grad_(Tensor dy, Tensor(a!) x) -> Tensor(a!)", lambda dy, x: x)
_ROTARY = _operator(
    "rotary_(Tensor q, Tensor k, Tensor v, Tensor(a!) rotated_q, Tensor(b!) rotated_k, Tensor(c!) copied_v,"
    " Tensor cos, Tensor sin, bool interleaved, Tensor? positions, bool back) -> ()",
    lambda *_: None,
)
swiglu = _operator("swiglu(Tensor x) -> Tensor", lambda x: x.new_empty(*x.shape[:-1], x.shape[-1] // 2))
gelu_grad_ = _operator(
    "gelu_grad_(Tensor(a!) dy, Tensor x) -> (Tensor(a!), Tensor)", lambda dy, x: (dy, _fp32(x, x.shape[-1]))
)
_LOSS_SUMS = _operator(
    "loss_sums(Tensor logits, Tensor labels, int num_columns, float factor, float softcap) -> (Tensor, Tensor)",
    lambda logits, *_: (_fp32(logits, len(logits)), _fp32(logits, 2, len(logits))),
)
_LOSS_GRAD = _operator(
    "loss_grad_(Tensor(a!) logits, Tensor labels, int num_columns, Tensor log_sum, Tensor scale, float factor,"
    " float softcap) -> Tensor(a!)",
    lambda logits, *_: logits,
)
add_rows = _operator(
    "add_rows_(Tensor(a!) table, Tensor rows, Tensor mine, Tensor values) -> Tensor(a!)", lambda table, *_: table
)


def swiglu_grad(dy: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, None]:
    return _SWIGLU_GRAD(dy, x), None


def _unless_wide(operator: Callable[..., Any], wide: Callable[..., Any]) -> Callable[..., Any]:
    """Return `operator`, a norm's, with `wide` in its place for rows that do not fit into registers."""
    return lambda x, *others: (wide if x.shape[-1] > WIDEST else operator)(x, *others)


rms_norm = _unless_wide(_RMS_NORM, eager.rms_norm)
rms_norm_grad = _unless_wide(_RMS_NORM_GRAD, eager.rms_norm_grad)


def layer_norm_grad(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *others: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if x.shape[-1] > WIDEST:
        return eager.layer_norm_grad(dy, x, weight, bias, *others)
    return _LAYER_NORM_GRAD(dy, x, weight, *others)


def loss_sums(
    logits: torch.Tensor, labels: torch.Tensor, num_columns: int, to_logits: LogitMap = PRODUCTS
) -> tuple[torch.Tensor, torch.Tensor]:
    return _LOSS_SUMS(logits, labels, num_columns, *to_logits)


def loss_kept(
    factor: torch.Tensor, total: torch.Tensor, log_sum: torch.Tensor, to_logits: LogitMap = PRODUCTS
) -> torch.Tensor:
    return log_sum


def loss_grad_(
    logits: torch.Tensor,
    labels: torch.Tensor,
    num_columns: int,
    log_sum: torch.Tensor,
    scale: torch.Tensor,
    to_logits: LogitMap = PRODUCTS,
) -> torch.Tensor:
    return _LOSS_GRAD(logits, labels, num_columns, log_sum, scale, *to_logits)


def dropout(
    x: torch.Tensor, residual: torch.Tensor | None, segments: Sequence[Segment], probability: float
) -> torch.Tensor:
    """The bits of `engine.kernels.dropout.eager`. Not for fp64."""
    flat = [number for segment in segments for number in segment]
    return _DROPOUT(x, residual, flat, threshold_of(probability), scale_of(probability))


def rotary(
    given: eager.Tensors, results: eager.Tensors, tables: RotaryTables, positions: torch.Tensor | None, back: bool
) -> None:
    _ROTARY(*given, *results, *tables, positions, back)
