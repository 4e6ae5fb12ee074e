"""Triton's kernels against torch's operators: on a GPU, or on a CPU in Triton's interpreter (tests/conftest.py).

The interpreter takes some 10 ms per program: there, sizes are tiny. It rounds to bf16 towards zero, where a GPU rounds
to the nearest: so bf16 is equal to one unit of the last place on a CPU, and to the bit on a GPU.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy
import pytest
import torch
import torch.nn.functional as F

from megazero.engine.kernels.dropout import Dropout, Rows
from megazero.engine.kernels.eager import PRODUCTS, LogitMap, wide
from megazero.engine.kernels.kernel_table import EAGER, TRITON, LossKernels
from megazero.engine.kernels.rotary import Rotary
from megazero.engine.model.context_parallel.dealt import DealtTokens, Ranges
from megazero.engine.model.context_parallel.key_exchange import AllKeys, Pair
from megazero.engine.model.documents import Documents
from megazero.engine.model.layers.fused_attention import fused_attention
from megazero.engine.model.scores import Scores
from megazero.run.kernel_choices import triton_complaint


def require_triton(interprets: bool = True) -> None:
    """Skip the test without Triton, or, if it `interprets` kernels, where Triton's interpreter and NumPy disagree."""
    reason = "no triton: torch brings it for GPUs, requirements-dev.txt for x86-64 Linux"
    triton = pytest.importorskip("triton", reason=reason)
    if interprets and not torch.cuda.is_available() and "0-dimensional arrays" in _interpreter_complaint():
        pytest.skip(f"the interpreter of Triton {triton.__version__} fails with NumPy {numpy.__version__}")


@functools.cache
def _interpreter_complaint() -> str:
    return triton_complaint(torch.device("cpu"))


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
    """Compare masks, values, sums with a residual, and gradients."""
    eager, triton = (Dropout(probability, 1234, 2, "mlp", k.dropout) for k in (EAGER, TRITON))
    count = sum(r.count for r in rows)
    x, residual, dy = (randn(count, columns, dtype=dtype, device=device, seed=i) for i in range(3))
    masks = triton.mask(x, rows), eager.mask(x, rows)
    assert torch.equal(masks[0] == 0, masks[1] == 0)
    assert_rounded_alike(*masks)
    assert_rounded_alike(triton(x.t().contiguous().t(), rows), eager(x, rows))  # strides do not matter
    # rounded twice, so that in bf16 on a CPU both roundings may differ
    if dtype != torch.bfloat16 or device != "cpu":
        assert_rounded_alike(triton.onto(residual, x.clone(), rows), eager.onto(residual, x.clone(), rows))
    leaf = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(triton(leaf, rows), leaf, dy)
    assert_rounded_alike(dx, eager.grad(dy, rows))


def check_large_dropout(device: str) -> None:
    """More than 2^31 elements: the mask of the last rows is that of these rows alone."""
    columns, count = 1 << 16, (1 << 15) + 8
    dropout = Dropout(0.3, 1234, 2, "mlp", TRITON.dropout)
    x = torch.ones(count, columns, dtype=torch.bfloat16, device=device)
    y = dropout(x, (Rows(5, 0, count),))
    assert torch.equal(y[-8:], Dropout(0.3, 1234, 2, "mlp", EAGER.dropout)(x[-8:], (Rows(5, count - 8, 8),)))


def cross_entropy(
    kernels: LossKernels,
    shards: list[torch.Tensor],
    columns: list[int],
    labels: torch.Tensor,
    scale: torch.Tensor,
    to_logits: LogitMap = PRODUCTS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (loss of each row, gradient of the products without padding), as tensor-parallel ranks compute them.

    Args:
        shards: each rank's products [T, v/tp], which are overwritten.
        columns: those that each has of the vocabulary; the rest is padding.
        scale: [T], the gradient of the loss.
    """
    firsts = [sum(columns[:i]) for i in range(len(columns))]
    local = [labels - first for first in firsts]
    found = [kernels.sums(*given, to_logits) for given in zip(shards, local, columns, strict=True)]
    highest = torch.stack([peak for peak, _ in found]).amax(0)
    factors = [(peak - highest).exp() for peak, _ in found]
    total = sum(sums[0] * factor for (_, sums), factor in zip(found, factors, strict=True))
    log_sum = total.log() + highest
    loss = log_sum - sum(sums[1] for _, sums in found)
    for logits, mine, num_columns, factor in zip(shards, local, columns, factors, strict=True):
        kept = kernels.kept(factor, total, log_sum, to_logits)
        kernels.grad_(logits, mine, num_columns, kept, scale, to_logits)
        assert not logits[:, num_columns:].any(), "a padded column has a gradient"
    return loss, torch.cat([logits[:, :n] for logits, n in zip(shards, columns, strict=True)], 1)


def check_loss(
    rows: int,
    columns: list[int],
    width: int,
    dtype: torch.dtype,
    device: str,
    to_logits: LogitMap = PRODUCTS,
    spread: float = 3.0,
) -> None:
    """Compare loss and gradient, of both implementations, with plain PyTorch in fp64.

    Padding is full of the largest number. Some products are -inf, one row's are far from 0, one row does not count.
    """
    whole = (spread * randn(rows, sum(columns), dtype=torch.float32, device=device)).to(dtype)
    whole[:, 1::7] = -torch.inf
    whole[1] -= 200
    labels = torch.arange(rows, device=device) * 5 % sum(columns) // 7 * 7
    labels[2] = sum(columns) - 1 if (sum(columns) - 1) % 7 != 1 else sum(columns) - 3
    scale = randn(rows, dtype=wide(whole), device=device, seed=1)
    scale[3] = 0
    exact = whole.double().requires_grad_()
    logits = exact * to_logits.factor
    if to_logits.softcap:
        logits = to_logits.softcap * (logits / to_logits.softcap).tanh()
    wanted = F.cross_entropy(logits, labels, reduction="none")
    wanted.backward(scale.double())
    for kernels in (EAGER.loss,) if dtype == torch.float64 else (EAGER.loss, TRITON.loss):
        shards = []
        for part in whole.split(columns, 1):
            padded = torch.full((rows, width), torch.finfo(dtype).max, dtype=dtype, device=device)
            padded[:, : part.shape[1]] = part
            shards.append(padded)
        loss, grad = cross_entropy(kernels, shards, columns, labels, scale, to_logits)
        # Triton's are fp32 sums of numbers up to 220, each off by 2^-17, and gradients that are rounded once. The eager
        # path without a cap also subtracts maxima, and rounds exponentials and factors, in the logits' type.
        eps, sums = torch.finfo(dtype).eps, 2**8 * torch.finfo(scale.dtype).eps
        once = kernels is TRITON.loss or to_logits.softcap
        assert loss.dtype == scale.dtype
        torch.testing.assert_close(loss.double(), wanted.detach(), rtol=0 if once else 8 * eps, atol=sums)
        error = (grad.double() - exact.grad).abs() / scale.abs().double().clamp(min=1e-30)[:, None]
        error = error.detach() / to_logits.factor
        assert float(error.max()) < max(eps if once else 8 * eps, sums), (kernels, float(error.max()))


def assert_near(found: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, roundings: float = 1.0) -> None:
    """Compare with fp64: fp32 sums of up to some thousand terms, and `roundings` of each result to `dtype`.

    Relative to the largest of a row, since a difference of two terms keeps their error.
    """
    eps = torch.finfo(dtype).eps
    size = exact.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    error = float(((found.double() - exact).abs() / size).max())
    assert error < max(roundings * eps, 2**-18), (error, dtype)


def check_norms(rows: int, columns: int, dtype: torch.dtype, device: str) -> None:
    """Compare both norms, of both implementations, with plain PyTorch in fp64; gradients also onto a residual's."""
    x, dy, residual = (randn(rows, columns, dtype=dtype, device=device, seed=i) for i in (0, 1, 4))
    x = x + 3  # a mean that must not be taken for a deviation
    weight, bias = (1 + randn(columns, dtype=dtype, device=device, seed=i) / 4 for i in (2, 3))

    def plus(exact: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
        return exact if other is None else exact + other.double()

    for kernels in (EAGER, TRITON):
        roundings = 2 if kernels is EAGER else 1  # torch's operators also round the gradient before the residual
        given = [t.double().requires_grad_() for t in (x, weight)]
        wanted = F.rms_norm(given[0], (columns,), given[1], 1e-5)
        y, rstd = kernels.rms_norm(x, weight, 1e-5)
        assert_near(y, wanted.detach(), dtype, 2)  # before the weight, and after it
        exact = torch.autograd.grad(wanted, given, dy.double())
        for other in (None, residual):
            dx, dweight = kernels.rms_norm_grad(dy, x, weight, rstd, other)
            assert dx.dtype == dtype and dweight.dtype == torch.float32
            assert_near(dx, plus(exact[0], other), dtype, 1 if other is None else roundings)
            assert_near(dweight, exact[1], torch.float32)
        given = [t.double().requires_grad_() for t in (x, weight, bias)]
        exact = torch.autograd.grad(F.layer_norm(given[0], (columns,), *given[1:], 1e-5), given, dy.double())
        _, mean, rstd = torch.native_layer_norm(x.float(), (columns,), weight.float(), bias.float(), 1e-5)
        if kernels is TRITON or dtype == torch.float32:  # a CPU's own wants its own type of mean
            for other in (None, residual):
                made = kernels.layer_norm_grad(dy, x, weight, bias, mean, rstd, other)
                for found, wanted in zip(made, (plus(exact[0], other), *exact[1:]), strict=True):
                    assert_near(found, wanted, found.dtype, 1 if other is None else roundings)


def check_swiglu(rows: int, columns: int, dtype: torch.dtype, device: str) -> None:
    """Compare with plain PyTorch in fp64; gates from where exp overflows to where it is 0."""
    x, dy = (
        randn(rows, 2 * columns, dtype=dtype, device=device),
        randn(rows, columns, dtype=dtype, device=device, seed=1),
    )
    x[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -0.0])
    exact = x.double().requires_grad_()
    gate, value = exact.chunk(2, -1)
    wanted = F.silu(gate) * value
    (dx,) = torch.autograd.grad(wanted, exact, dy.double())
    for swiglu, roundings in (
        (TRITON.activations["swiglu"], 1),
        (EAGER.activations["swiglu"], 4),
    ):  # torch's operators round in between, too
        assert_near(swiglu.forward(x), wanted.detach(), dtype, roundings)
        assert_near(swiglu.grad(dy.clone(), x.clone())[0], dx, dtype, roundings)


def check_gelu(rows: int, columns: int, dtype: torch.dtype, device: str) -> None:
    """Compare with plain PyTorch in fp64, the sum over tokens too; from where exp overflows to where it is 0."""
    x, dy = (randn(rows, columns, dtype=dtype, device=device, seed=i) for i in range(2))
    x[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -0.0])
    exact = x.double().requires_grad_()
    wanted = F.gelu(exact, approximate="tanh")
    (dx,) = torch.autograd.grad(wanted, exact, dy.double())
    for gelu in (TRITON.activations["gelu-tanh"], EAGER.activations["gelu-tanh"]):
        assert_near(gelu.forward(x), wanted.detach(), dtype)
        found, summed = gelu.grad(dy.clone(), x.clone())
        assert_near(found, dx, dtype)
        assert (summed is None) == (gelu is EAGER.activations["gelu-tanh"])
        if summed is not None:
            assert_near(summed, dx.sum(0), torch.float32)


def check_rotary(
    dtype: torch.dtype, device: str, heads: int = 3, groups: int = 1, dim: int = 12, rotary: Rotary | None = None
) -> None:
    """Compare with products of complex numbers in fp64: forward and back, of strided tensors, at given positions."""
    b, s = 2, 3
    rotary = rotary or Rotary(dim, 100.0)
    tables = rotary.tables(s + 4, dtype, torch.device(device))
    angles = torch.arange(s + 4.0)[:, None, None].double() * rotary.frequencies(torch.device("cpu")).double()
    pair = [randn(b, s, heads if i == 0 else groups, dim, dtype=dtype, device=device, seed=i) for i in range(3)]
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in pair]
    for positions in (None, torch.tensor([[0, 1, 0], [4, 5, 6]], device=device)):
        at = torch.arange(s).expand(b, s) if positions is None else positions.cpu()
        for given, back in ((pair, False), (strided, True)):
            turn = torch.polar(torch.full_like(angles[at], rotary.amplitude), -angles[at] if back else angles[at])
            for kernels in (EAGER, TRITON):
                joined = torch.full((b, s, groups, 2, dim), torch.nan, dtype=dtype, device=device)
                results = (torch.full_like(pair[0], torch.nan), *joined.unbind(3))
                kernels.rotary(tuple(given), results, tables, positions, back)
                for x, found in zip(given[:2], results[:2], strict=True):
                    rotated, rest = x.cpu().double().tensor_split([rotary.dim], -1)
                    wanted = torch.cat([_turned(rotated, turn, rotary.interleaved), rest], -1)
                    # the tables are rounded, to fp32 at the least, where the angles too are
                    assert_near(found.cpu(), wanted, dtype, 4)
                    assert torch.equal(found[..., rotary.dim :], x[..., rotary.dim :])
                assert torch.equal(results[2], given[2])


def _turned(x: torch.Tensor, turn: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [.., d], as complex numbers of the dims that are rotated together, times turn [.., d/2]."""
    at = -1 if interleaved else -2
    half = x.shape[-1] // 2
    pairs = x.reshape(*x.shape[:-1], *((half, 2) if interleaved else (2, half)))
    product = torch.complex(*pairs.unbind(at)) * turn
    return torch.stack([product.real, product.imag], at).flatten(-2)


def check_add_rows(dtype: torch.dtype, device: str, total: int = 11, columns: int = 20) -> None:
    """Compare with sums in fp64: places that repeat within a piece and over several, and places of other ranks."""
    rows = torch.tensor([3, 0, 3, 3, 1, 3, 3, 3, 5, 3, 5], device=device).repeat(-(-total // 11))[:total]
    mine = torch.arange(total, device=device) % 5 != 3
    values, table = (randn(n, columns, dtype=d, device=device) for n, d in ((total, dtype), (6, torch.float32)))
    wanted = table.double().index_add(0, rows[mine], values[mine].double())
    for kernels in (EAGER, TRITON):
        found = [table.clone() for _ in range(2)]
        for into in found:
            kernels.add_rows(into, torch.where(mine, rows, 0), mine, values)
        assert_near(found[0], wanted, torch.float32)
        assert torch.equal(*found)


class _Blocks(AllKeys):
    """Whole keys in the blocks of a ring's ranks, the first of which is `rank`'s. Its gradients are of whole keys."""

    merges = True

    def __init__(self, dealt: DealtTokens) -> None:
        self.dealt = dealt

    def tokens(self, batch: int, length: int) -> list[tuple[Ranges, ...]]:
        order = [(self.dealt.rank - step) % len(self.dealt.ranges[0]) for step in range(len(self.dealt.ranges[0]))]
        return [self.dealt.of_rank(rank) for rank in order]

    def blocks(self, k: torch.Tensor, v: torch.Tensor) -> Iterator[Pair]:
        for ranges in self.tokens(len(k), k.shape[2]):
            yield self._of(k, ranges), self._of(v, ranges)

    def reduce(self, gradients: Iterable[Pair]) -> Pair:
        whole = [torch.cat(parts, 2) for parts in zip(*gradients, strict=True)]
        found = self.tokens(len(whole[0]), whole[0].shape[2])
        for x in whole:
            for number, row in enumerate(x):
                at = [index for ranges in found for run in ranges[number] for index in run]
                row[:, torch.tensor(at, device=x.device)] = row.clone()
        return whole[0], whole[1]

    def _of(self, x: torch.Tensor, ranges: tuple[Ranges, ...]) -> torch.Tensor:
        parts = [
            torch.cat([row[:, run.start : run.stop] for run in own], 1) for row, own in zip(x, ranges, strict=True)
        ]
        return torch.stack(parts)


def check_flash_pieces(
    dtype: torch.dtype, device: str, ranges: Sequence[Sequence[Sequence[range]]], heads: int, groups: int, width: int
) -> None:
    """Compare the attention of the second rank's queries with plain PyTorch in fp64: of whole keys, and of a ring's.

    Pieces of one query, with a window or documents. Results are sums of a few roundings.
    """
    b, length = len(ranges), max(run.stop for own in ranges[0] for run in own)
    dealt = DealtTokens.of(ranges, 1, length)
    tokens = dealt.indices.shape[1]
    wide = [
        torch.randn(b, n, s, width, generator=torch.Generator().manual_seed(n + s)).to(dtype).double()
        for n, s in ((heads, tokens), (groups, length), (groups, length + 1), (heads, tokens + 1))
    ]
    wide[2:] = [x[:, :, 1:] for x in wide[2:]]
    starts = torch.zeros(b, length, dtype=torch.int64)
    starts[:, length // 3 :] = length // 3
    at = torch.arange(length)
    for scores, documents, ring in itertools.product(
        (Scores(), Scores(window=length // 5, scale=0.3)), (None, Documents.of(starts)), (False, True)
    ):
        if ring and scores.window:
            continue
        seen = at <= dealt.indices[..., None]
        if documents is not None:
            seen &= at >= starts.gather(1, dealt.indices)[..., None]
        if scores.window:
            seen &= at > dealt.indices[..., None] - scores.window
        q, k, v = (x.clone().requires_grad_() for x in wide[:3])
        repeated = (x.repeat_interleave(heads // groups, 1) for x in (k, v))
        weights = q * scores.factor(width) @ next(repeated).mT
        y = weights.masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ next(repeated)
        wanted = [y, *torch.autograd.grad(y, (q, k, v), wide[3])]
        there = dealt._replace(indices=dealt.indices.to(device), rows=dealt.rows.to(device))
        given = [x.detach().to(dtype).to(device).requires_grad_() for x in (q, k, v)]
        y = fused_attention(*given, scores, documents, there, _Blocks(dealt) if ring else AllKeys())
        found = [y, *torch.autograd.grad(y, given, wide[3].to(dtype).to(device))]
        for ours, theirs in zip(found, wanted, strict=True):
            error = (ours.detach().cpu().double() - theirs.detach()).norm() / theirs.detach().norm()
            assert error < 4 * torch.finfo(dtype).eps, (scores, documents is not None, ring, error)
