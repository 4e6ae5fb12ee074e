"""The one `linear`, the layers that cut it over tp, the token table and the vocabulary's loss.

Activations are [T, h], the T = b s tokens of a micro-batch one below the other. The residual stream holds all of them
on every tensor-parallel rank, or with sequence parallelism 1/tp of them: see `Stream`.

Parameters never collect a `.grad`. Every Function that uses one hands its gradient to `contribute(parameter, write)`,
which calls `write(out, add)` with `out` the parameter's window of a flat gradient buffer: to be written (add False: the
first contribution) or added to.

Shapes: b micro-batch, s sequence, T tokens, T' those of the residual stream on this rank, h hidden, v vocabulary;
/tp = this rank's part.

Note [the Parameter itself]: a Function that needs a weight in backward keeps the Parameter as a plain attribute, never
a view or a cast of it, and never through save_for_backward. A released weight is gathered into another slot, so
backward must ask the Parameter where it is now; and under checkpoint a saved weight comes back as weight.detach().
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from megazero.ledger import Ledger
from megazero.mesh import MAX, Axis, Pending
from megazero.parameters import ParamSpec
from megazero.pieces import PLAIN, Pieces

Write = Callable[[torch.Tensor, bool], None]
Contribute = Callable[[nn.Parameter, Write], None]

# See Note [oneDNN].
PREFERS_ONEDNN = (
    torch.backends.mkldnn.is_available()
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CHUNK_BYTES = 1 << 20  # rows of logits that are worked on together: what stays in a core's cache


class Arriving(NamedTuple):
    """A collective's result, on its way."""

    data: torch.Tensor
    pending: Pending

    def wait(self) -> torch.Tensor:
        self.pending.wait()
        return self.data


@dataclass(frozen=True)
class Stream:
    """How the residual stream lies on the tensor-parallel ranks, and so what a cut layer's two ends send.

    Whole: all T tokens on every rank; nothing is gathered, sums are all-reduces. Cut (sequence parallelism): rank r
    has the r-th T/tp of the tokens; they are gathered where a layer needs all of them, sums are reduce-scatters. Either
    way the gradient of a gather is a sum, and that of a sum a gather.

    The cut is through the tokens of all samples one below the other, not through every sample's sequence: so what is
    gathered lies in order, without a copy, and tp must divide b s only. Norms, dropout and residual sums work on single
    tokens; what depends on a token's place asks `tokens`.
    """

    tp: Axis
    cut: bool

    def start_gather(self, x: torch.Tensor) -> Arriving:
        """x [T', c] -> [T, c]"""
        if not self.cut:
            return Arriving(x, Pending())
        whole = x.new_empty(x.shape[0] * self.tp.size, *x.shape[1:])
        return Arriving(whole, self.tp.start_all_gather(x.contiguous(), whole))

    def start_sum(self, part: torch.Tensor) -> Arriving:
        """part [T, c], each rank's summand -> [T', c]. Where the stream is whole, in place."""
        if not self.cut:
            return Arriving(part, self.tp.start_all_reduce(part))
        out = part.new_empty(part.shape[0] // self.tp.size, *part.shape[1:])
        scratch = part.new_empty(self.tp.scratch_numel(out.numel()) if self.tp.staged else 0)
        return Arriving(out, self.tp.start_reduce_scatter(part.view(-1), out.view(-1), False, scratch))

    def tokens(self, total: int) -> range:
        """Which of a micro-batch's T tokens this rank holds."""
        if not self.cut:
            return range(total)
        assert total % self.tp.size == 0, (total, self.tp.size)
        each = total // self.tp.size
        return range(self.tp.rank * each, (self.tp.rank + 1) * each)


@dataclass(frozen=True)
class Context:
    """What every layer is built with."""

    stream: Stream
    contribute: Contribute
    ledger: Ledger
    precision: str
    device: torch.device
    selective: bool = False  # recompute
    pieces: Pieces = PLAIN

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.precision]

    @property
    def tp(self) -> Axis:
        return self.stream.tp

    def parameter(self, spec: ParamSpec) -> nn.Parameter:
        """A released parameter: one NaN seen under its local shape, until ZeRO gives it memory."""
        shape = spec.local(self.tp.size, self.tp.rank).stored
        nan = torch.full((), torch.nan, dtype=self.dtype, device=self.device)
        return nn.Parameter(nan.expand(shape), requires_grad=spec.trains)


def write_sum(gradient: torch.Tensor) -> Write:
    """The `write` of a gradient that is there already."""
    return lambda out, add: _write(out, add, gradient)


def _write(out: torch.Tensor, add: bool, gradient: torch.Tensor) -> None:
    gradient = gradient.view(out.shape)
    if add:
        out.add_(gradient)
    else:
        out.copy_(gradient)


# -- the one linear: y = x @ weight.T, with weight [out, in]


def _upcasts(x: torch.Tensor) -> bool:
    """16-bit products on a CPU: fp32 ones with casts around are some 60 times faster, and no less exact."""
    return x.device.type == "cpu" and x.dtype != torch.float32


def _affine(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """F.linear: x [.., in], weight [out, in] -> [.., out]; in fp32 on a CPU by oneDNN where that is faster.

    Note [oneDNN]: torch's own fp32 products are MKL's, which on AMD's CPUs with AVX-512 reach about half the speed of
    oneDNN's; with AVX2 alone they are 10 to 30 % faster, and write weight gradients in place. The operator is the one
    that torch.compile uses; where it is missing, F.linear does the same.
    """
    if x.device.type == "cpu" and x.dtype == torch.float32 and PREFERS_ONEDNN:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def output(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[.., in] -> [.., out]"""
    if _upcasts(x):
        return _affine(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
    return _affine(x, weight, bias)


def input_grad(dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[.., out] -> [.., in]"""
    if _upcasts(dy):
        return _affine(dy.float(), weight.float().t()).to(dy.dtype)
    return _affine(dy, weight.t())


def weight_grad(x: torch.Tensor, dy: torch.Tensor, out: torch.Tensor, add: bool) -> None:
    """out [out, in] (+)= dy.T @ x, into the flat buffer."""
    x, dy, out = x.flatten(0, -2), dy.flatten(0, -2), _matrix(out)
    if x.device.type == "cpu" and PREFERS_ONEDNN:  # faster, with the copy, than MKL in place
        _write(out, add, _affine(dy.float().t(), x.float().t()))
    elif x.dtype == out.dtype and not _upcasts(x):
        if add:
            out.addmm_(dy.t(), x)
        else:
            torch.mm(dy.t(), x, out=out)
    elif _upcasts(x):
        _write(out, add, dy.float().t() @ x.float())
    else:  # a GPU multiplies in 16 bit, and sums and returns fp32
        _write(out, add, torch.mm(dy.t(), x, out_dtype=out.dtype))


def _matrix(weight: torch.Tensor) -> torch.Tensor:
    """[heads, 3, d, h] -> [heads * 3 * d, h]; a matrix stays what it is."""
    return weight.flatten(0, -2) if weight.dim() > 2 else weight


class _Linear(torch.autograd.Function):
    """See Note [the Parameter itself]. `stream`: where the input is the residual stream, else None.

    Of a cut stream this rank's tokens alone are kept, and gathered again in backward. Nothing waits: the tokens arrive
    while the input gradient is computed, and that is summed while the weight gradient is.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, adds_bias, stream, contribute):
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.adds_bias, ctx.stream, ctx.contribute = weight, bias, adds_bias, stream, contribute
        added = bias.detach().flatten() if adds_bias else None
        whole = x if stream is None else stream.start_gather(x).wait()
        return output(whole, _matrix(weight.detach()), added)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        gathers = ctx.stream is not None and ctx.weight.requires_grad
        gathering = ctx.stream.start_gather(x) if gathers else Arriving(x, Pending())
        summing = None
        if ctx.needs_input_grad[0]:
            dx = input_grad(dy, _matrix(ctx.weight.detach()))
            summing = ctx.stream.start_sum(dx) if ctx.stream is not None else Arriving(dx, Pending())
        whole = gathering.wait()
        ctx.contribute(ctx.weight, lambda out, add: weight_grad(whole, dy, out, add))  # not asked for if frozen
        if ctx.stream is not None:
            ctx.contribute(ctx.bias, write_sum(dy.sum(0)))
        return summing and summing.wait(), None, None, None, None, None


class _SumParts(torch.autograd.Function):
    """The sum over tp of everyone's part; the part is fresh from a product, and nobody has kept it.

    The bias, if there is one, is in the parts already; its gradient is of this rank's tokens.
    """

    @staticmethod
    def forward(ctx, part, bias, stream, contribute):
        ctx.bias, ctx.stream, ctx.contribute = bias, stream, contribute
        return stream.start_sum(part).wait().view(-1, part.shape[-1])

    @staticmethod
    def backward(ctx, dy):
        gathering = ctx.stream.start_gather(dy)
        if ctx.bias is not None:
            ctx.contribute(ctx.bias, write_sum(dy.sum(0)))
        return gathering.wait(), None, None, None


class ColumnLinear(nn.Module):
    """y [T, out/tp] = x [T', in] of all tokens @ weight[out/tp, in].T + bias[out/tp]"""

    def __init__(self, weight: ParamSpec, bias: ParamSpec, context: Context) -> None:
        super().__init__()
        self.context = context
        self.weight, self.bias = context.parameter(weight), context.parameter(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        c = self.context
        return _Linear.apply(x, self.weight, self.bias, True, c.stream, c.contribute)


class RowLinear(nn.Module):
    """y [T', out] = sum over tp of x [T, in/tp] @ weight[out, in/tp].T, + bias[out], which the first rank adds."""

    def __init__(self, weight: ParamSpec, bias: ParamSpec, context: Context) -> None:
        super().__init__()
        self.context = context
        self.weight, self.bias = context.parameter(weight), context.parameter(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        c = self.context
        part = _Linear.apply(x, self.weight, self.bias, c.tp.is_first, None, c.contribute)
        return _SumParts.apply(part, self.bias, c.stream, c.contribute)


# -- the vocabulary


class VocabularyTable(nn.Module):
    """A [v, h] table whose rows are cut over tp. Rows that only pad this rank's part stand for no token.

    As the token table it is looked up; as the output matrix it gives logits; a tied one does both.
    """

    def __init__(self, spec: ParamSpec, context: Context) -> None:
        super().__init__()
        self.context = context
        block = spec.local(context.tp.size, context.tp.rank)
        self.first_row, self.num_rows = block.offset[0], block.shape[0]
        self.weight = context.parameter(spec)

    def localise(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids -> local row numbers (0 where foreign), and which are this rank's. Shapes as ids."""
        rows = ids - self.first_row
        mine = (rows >= 0) & (rows < self.num_rows)
        return rows.masked_fill(~mine, 0), mine

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [b, s] -> [T', h]"""
        c = self.context
        rows, mine = self.localise(ids.flatten())
        return _SumParts.apply(_Lookup.apply(rows, mine, self.weight, c.contribute), None, c.stream, c.contribute)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x [.., h] -> this rank's logits [.., v/tp], without padding. For generation and tests; has no gradient."""
        return output(x, self.weight.detach()[: self.num_rows])


class _Lookup(torch.autograd.Function):
    """Rows of the local part of the table, zero for foreign ids. Backward needs no weights."""

    @staticmethod
    def forward(ctx, rows, mine, weight, contribute):
        ctx.save_for_backward(rows, mine)
        ctx.weight, ctx.contribute = weight, contribute
        return F.embedding(rows, weight.detach()).masked_fill_(~mine[..., None], 0)

    @staticmethod
    def backward(ctx, dy):
        rows, mine = ctx.saved_tensors

        def write(out: torch.Tensor, add: bool) -> None:
            if not add:
                out.zero_()
            ours = dy.masked_fill(~mine[..., None], 0).flatten(0, -2)  # selecting rows would wait for the GPU
            out.index_add_(0, rows.flatten(), ours.to(out.dtype))

        ctx.contribute(ctx.weight, write)
        return None, None, None, None


class _VocabularyLoss(torch.autograd.Function):
    """Logits, softmax and cross-entropy, with one tensor of the logits' size: it holds the logits, then their
    exponentials, then their gradient. Two all-reduces of [T] (the maxima; sums and picked logits), never the logits.

    Each rank's exponentials are relative to its own maximum; `factor` turns them into probabilities.
    """

    @staticmethod
    def forward(ctx, x, weight, labels, weights, table, context):
        tp = context.tp
        logits = output(context.stream.start_gather(x).wait(), weight.detach())  # [T, v/tp]
        lease = context.ledger.lease("logits", logits.numel() * logits.element_size())
        logits[:, table.num_rows :] = -torch.inf  # padding: probability 0, gradient 0
        rows, mine = (t.flatten() for t in table.localise(labels))
        peak = torch.empty(len(logits), device=x.device)  # [T], fp32 like all of the following
        stats = torch.empty(2, len(logits), device=x.device)  # sum of exponentials, logit of the label
        for part in _chunks(logits):
            chunk = logits[part]
            # clamped: a rank whose rows are all padding has no maximum
            peak[part] = top = chunk.amax(-1).float().clamp_(min=torch.finfo(chunk.dtype).min)
            stats[1, part] = chunk.gather(-1, rows[part, None])[:, 0].float()
            chunk.sub_(top.to(chunk.dtype)[:, None]).exp_()
            stats[0, part] = chunk.sum(-1, dtype=torch.float32)
        stats[1].masked_fill_(~mine, 0)
        highest = tp.all_reduce_(peak.clone(), op=MAX)
        factor = (peak - highest).exp_()
        stats[0] *= factor
        tp.all_reduce_(stats)
        loss = stats[0].log() + highest - stats[1]
        ctx.save_for_backward(x, logits, factor / stats[0], rows, mine, weights)
        ctx.weight, ctx.context, ctx.lease = weight, context, lease
        return (loss * weights.flatten()).sum(dtype=torch.float64)

    @staticmethod
    def backward(ctx, dloss):
        x, dlogits, factor, rows, mine, weights = ctx.saved_tensors
        trains = ctx.weight.requires_grad
        gathering = ctx.context.stream.start_gather(x) if trains else Arriving(x, Pending())
        scale = weights.flatten() * dloss  # [T]
        picked = (-scale).masked_fill_(~mine, 0).to(dlogits.dtype)[:, None]
        factor = (factor * scale).to(dlogits.dtype)[:, None]
        for part in _chunks(dlogits):
            dlogits[part].mul_(factor[part]).scatter_add_(-1, rows[part, None], picked[part])
        summing = ctx.context.stream.start_sum(input_grad(dlogits, ctx.weight.detach()))
        whole = gathering.wait()
        ctx.context.contribute(ctx.weight, lambda out, add: weight_grad(whole, dlogits, out, add))
        ctx.lease.end()
        return summing.wait(), None, None, None, None, None


def _chunks(logits: torch.Tensor) -> list[slice]:
    rows = len(logits)
    if logits.device.type != "cpu":
        return [slice(0, rows)]  # a GPU wants few, large kernels
    each = max(1, CHUNK_BYTES // (logits.shape[1] * logits.element_size()))
    return [slice(at, min(at + each, rows)) for at in range(0, rows, each)]


def vocabulary_loss(
    x: torch.Tensor, table: VocabularyTable, labels: torch.Tensor, weights: torch.Tensor, context: Context
) -> torch.Tensor:
    """Sum over the micro-batch of weights x cross-entropy in nats, a scalar in fp64, the same on all of tp.

    Shapes: x [T', h], labels [b, s] of token ids, weights [b, s] in fp32.
    """
    return _VocabularyLoss.apply(x, table.weight, labels, weights, table, context)
