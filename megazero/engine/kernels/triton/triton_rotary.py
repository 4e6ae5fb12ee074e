"""Rotary positions of queries and keys, and copies of values and of dims that stay, in one launch each way.

Bytes per element of w bytes: 2 w, plus the tables' once. torch's operators take eight launches and 11 w. Computed in
fp32 and rounded once. Tensors are [b, s, heads, d] with any strides except the last dim's, which is 1, because the
gradients' strides are those that attention's backward chooses.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from megazero.engine.kernels.triton.triton_options import options


@triton.jit
def _rotate(source, result, heads, half, away, head_in, head_out, cos, sin, STEP: tl.constexpr, HEADS: tl.constexpr,
            HALF: tl.constexpr):  # fmt: skip
    """Rotate the heads of one token; the dims STEP i and STEP i + away of a head are rotated together."""
    pair = tl.arange(0, HALF)[None, :]
    for first in range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)[:, None]
        inside = (head < heads) & (pair < half)
        given = tl.load(source + head * head_in + STEP * pair, mask=inside, other=0.0)
        paired = tl.load(source + head * head_in + away + STEP * pair, mask=inside, other=0.0)
        a, b = given.to(tl.float32), paired.to(tl.float32)
        tl.store(result + head * head_out + STEP * pair, (a * cos - b * sin).to(given.dtype), mask=inside)
        tl.store(result + head * head_out + away + STEP * pair, (b * cos + a * sin).to(given.dtype), mask=inside)


@triton.jit
def _copy(source, result, heads, dims, head_in, head_out, HEADS: tl.constexpr, DIMS: tl.constexpr):
    dim = tl.arange(0, DIMS)[None, :]
    for first in range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)[:, None]
        inside = (head < heads) & (dim < dims)
        tl.store(result + head * head_out + dim, tl.load(source + head * head_in + dim, mask=inside), mask=inside)


@triton.jit
def _rotary(
    q_in, k_in, v_in, q_out, k_out, v_out, cosines, sines, positions, heads, groups, length, dims, half,
    q_in_b, q_in_s, q_in_n, k_in_b, k_in_s, k_in_n, v_in_b, v_in_s, v_in_n,
    q_out_b, q_out_s, q_out_n, k_out_b, k_out_s, k_out_n, v_out_b, v_out_s, v_out_n,
    BACK: tl.constexpr, PLACED: tl.constexpr, STEP: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
    REST: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """All heads of one token per program. BACK: rotate by the negative angle. PLACED: read positions.

    STEP: 2 if dims are interleaved. HALF, REST and DIMS are powers of two, at least the pairs of a head, its dims that
    are not rotated, and all of them.
    """
    token = tl.program_id(0)
    b, s = (token // length).to(tl.int64), (token % length).to(tl.int64)
    place = s
    if PLACED:
        place = tl.load(positions + token)
    pair = tl.arange(0, HALF)[None, :]
    cos = tl.load(cosines + place * 2 * half + STEP * pair, mask=pair < half, other=0.0).to(tl.float32)
    sin = tl.load(sines + place * half + pair, mask=pair < half, other=0.0).to(tl.float32)
    if BACK:
        sin = -sin
    away = half
    if STEP == 2:
        away = 1
    turned, rest = 2 * half, dims - 2 * half
    q, to = q_in + b * q_in_b + s * q_in_s, q_out + b * q_out_b + s * q_out_s
    _rotate(q, to, heads, half, away, q_in_n, q_out_n, cos, sin, STEP, HEADS, HALF)
    if REST:
        _copy(q + turned, to + turned, heads, rest, q_in_n, q_out_n, HEADS, REST)
    k, to = k_in + b * k_in_b + s * k_in_s, k_out + b * k_out_b + s * k_out_s
    _rotate(k, to, groups, half, away, k_in_n, k_out_n, cos, sin, STEP, HEADS, HALF)
    if REST:
        _copy(k + turned, to + turned, groups, rest, k_in_n, k_out_n, HEADS, REST)
    v, to = v_in + b * v_in_b + s * v_in_s, v_out + b * v_out_b + s * v_out_s
    _copy(v, to, groups, dims, v_in_n, v_out_n, HEADS, DIMS)


def rotary_(q: torch.Tensor, k: torch.Tensor, *others: Any) -> None:
    """See `Kernels.rotary`; others: v, three results, the fields of `RotaryTables`, positions, back."""
    v, *results, cos, sin, interleaved, positions, back = others
    b, s, heads, d = q.shape
    rotated = cos.shape[-1]
    tensors = q, k, v, *results
    assert all(t.stride(-1) == 1 and t.dtype == q.dtype for t in tensors), [(t.dtype, t.stride()) for t in tensors]
    assert cos.is_contiguous() and sin.is_contiguous() and d >= rotated == 2 * sin.shape[-1], (cos.shape, d)
    assert positions is None or (positions.is_contiguous() and positions.shape == (b, s)), positions
    half, rest, dims = (triton.next_power_of_2(n) for n in (rotated // 2, d - rotated, d))
    together = max(1, min(triton.next_power_of_2(heads), 2048 // dims))
    if not rotated:
        for source, result in zip((q, k, v), results, strict=True):
            result.copy_(source)
    elif q.numel():
        _rotary[(b * s,)](
            *tensors, cos, sin, positions, heads, k.shape[2], s, d, rotated // 2,
            *[stride for t in tensors for stride in t.stride()[:3]],
            BACK=back, PLACED=positions is not None, STEP=2 if interleaved else 1, HEADS=together, HALF=half,
            REST=rest, DIMS=dims, **options(together * dims // 2),
        )  # fmt: skip
