"""The operations of `Kernels` by torch's operators, below autograd. Dropout is in `engine.kernels.dropout`.

Shapes: b micro-batch, s sequence, T tokens, h hidden, n heads, d head dim, v vocabulary; /tp = this rank's part.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from megazero.engine.kernels.rotary import RotaryTables, rotate
from megazero.engine.options.model_options import SWIGLU_LIMIT, SWIGLU_SLOPE

Tensors = tuple[torch.Tensor, ...]

LOGIT_CHUNK_BYTES = 1 << 20  # rows of logits computed together: they fit in a core's cache
TEMPORARY_BYTES = 1 << 28  # rows of logits that a GPU computes together in another tensor
GELU_A = 2 * (2 / torch.pi) ** 0.5  # gelu(x) = x sigmoid(A x + B x^3), by tanh
GELU_B = 0.044715 * GELU_A


def wide(x: torch.Tensor) -> torch.dtype:
    """Return the type in which sums over x are made: fp32, or fp64 of fp64."""
    return torch.promote_types(x.dtype, torch.float32)


def is_stand_in(x: torch.Tensor) -> bool:
    """Return whether x has no data: a layer is being traced. Computations take it whole, not in chunks."""
    return x.is_meta or type(x) not in (torch.Tensor, torch.nn.Parameter)


def gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def gelu_grad(dy: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, None]:
    return torch.ops.aten.gelu_backward.grad_input(dy, x, approximate="tanh", grad_input=dy), None


def exact_gelu_grad(dy: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, None]:
    return torch.ops.aten.gelu_backward.grad_input(dy, x, grad_input=dy), None


def relu_grad(dy: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, None]:
    return torch.ops.aten.threshold_backward.grad_input(dy, x, 0, grad_input=dy), None


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square_()


def squared_relu_grad(dy: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, None]:
    return dy.mul_(F.relu(x)).mul_(2), None


def geglu(x: torch.Tensor) -> torch.Tensor:
    gate, value = x.chunk(2, dim=-1)
    return gelu(gate).mul_(value)


def geglu_grad(dy: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, None]:
    gate, value = x.chunk(2, dim=-1)
    dgelu = dy * value
    torch.mul(dy, gelu(gate), out=value)
    gate.copy_(gelu_grad(dgelu, gate)[0])
    return x, None


def swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(value)


def swiglu_grad(dy: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, None]:
    gate, value = x.chunk(2, dim=-1)
    dsilu = dy * value
    torch.mul(dy, F.silu(gate), out=value)
    torch.ops.aten.silu_backward.grad_input(dsilu, gate, grad_input=gate)
    return x, None


def clamped_swiglu(x: torch.Tensor) -> torch.Tensor:
    """Return gate sigmoid(1.702 gate) (value + 1), as in gpt-oss. Gates are at most 7, values between -7 and 7."""
    gate, value = x.chunk(2, dim=-1)
    gate = gate.clamp(max=SWIGLU_LIMIT)
    return (gate * SWIGLU_SLOPE).sigmoid_().mul_(gate).mul_(value.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT).add_(1))


def clamped_swiglu_grad(dy: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, None]:
    gate, value = x.chunk(2, dim=-1)
    inside = gate <= SWIGLU_LIMIT, value.abs() <= SWIGLU_LIMIT
    gate.clamp_(max=SWIGLU_LIMIT)
    slope = (gate * SWIGLU_SLOPE).sigmoid_()
    dgate = slope * dy * (value.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1) * inside[0]
    torch.mul(slope * gate * dy, inside[1], out=value)
    gate.copy_(dgate * ((1 - slope) * gate * SWIGLU_SLOPE + 1))
    return x, None


def unseen(scores: torch.Tensor, starts: torch.Tensor | None, indices: torch.Tensor | None = None) -> torch.Tensor:
    """Return a mask of the keys that a query does not see: [s, s], or [b, 1, t, s]."""
    at = torch.arange(scores.shape[-1], device=scores.device)
    future = at > (at[:, None] if indices is None else indices[:, None, :, None])
    return future if starts is None else future | (at < starts[:, None, :, None])


def causal_softmax(
    scores: torch.Tensor, starts: torch.Tensor | None = None, indices: torch.Tensor | None = None
) -> torch.Tensor:
    scores = scores.masked_fill_(unseen(scores, starts, indices), -torch.inf)
    return scores.softmax(-1, dtype=wide(scores)).to(scores.dtype)


def scores_grad(weights: torch.Tensor, dropped: torch.Tensor, ddropped: torch.Tensor, scale: float) -> torch.Tensor:
    """The gradient of softmax and dropout: weights * dweights is dropped * ddropped, so the mask is made once."""
    product = dropped * ddropped
    mean = product.sum(-1, keepdim=True, dtype=wide(product)).to(product.dtype)
    return product.sub_(weights * mean).mul_(scale)


def _local(labels: torch.Tensor, num_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return column numbers, 0 for other ranks' labels; and a mask of this rank's labels."""
    mine = (labels >= 0) & (labels < num_columns)
    return labels.masked_fill(~mine, 0), mine


class LogitMap(NamedTuple):
    """From products x of hidden states and the output matrix to logits: factor x, capped by C to C tanh(factor x / C).

    Attributes:
        softcap: C; 0: no cap.
    """

    factor: float = 1.0
    softcap: float = 0.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map products to logits: in place without a cap, else in a new tensor, in fp32 or wider."""
        if self.softcap:
            return self.tanh(x).mul_(self.softcap)
        return x if self.factor == 1.0 else x.mul_(self.factor)

    def tanh(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits / C."""
        return (x.to(wide(x)) * (self.factor / self.softcap)).tanh_()


PRODUCTS = LogitMap()  # the products are the logits


def loss_sums(
    logits: torch.Tensor, labels: torch.Tensor, num_columns: int, to_logits: LogitMap = PRODUCTS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Leave the exponentials, relative to the row's maximum, in place of the products.

    With a cap the products stay, because the gradient needs tanh, which exponentials that underflow do not give.
    """
    logits[:, num_columns:] = -torch.inf  # padding: probability 0, gradient 0
    columns, mine = _local(labels, num_columns)
    peak = logits.new_empty(len(logits), dtype=wide(logits))  # [T]; all of the following in fp32, or in fp64
    sums = peak.new_empty(2, len(logits))
    for part in _chunks(logits, temporary=bool(to_logits.softcap)):
        chunk, factor = logits[part], to_logits.factor
        if to_logits.softcap:
            chunk, factor = to_logits(chunk), 1.0
            chunk[:, num_columns:] = -torch.inf  # the map made it -C
        # clamped, because a rank whose columns are all padding has no maximum
        peak[part] = top = chunk.amax(-1).to(peak.dtype).clamp_(min=torch.finfo(chunk.dtype).min)
        sums[1, part] = chunk.gather(-1, columns[part, None])[:, 0]
        chunk.sub_(top.to(chunk.dtype)[:, None])
        if factor != 1.0:  # after the maximum is subtracted, because large products would lose digits
            chunk.mul_(factor)
            peak[part] *= factor
            sums[1, part] *= factor
        sums[0, part] = chunk.exp_().sum(-1, dtype=peak.dtype)
    sums[1].masked_fill_(~mine, 0)
    return peak, sums


def loss_kept(
    factor: torch.Tensor, total: torch.Tensor, log_sum: torch.Tensor, to_logits: LogitMap = PRODUCTS
) -> torch.Tensor:
    """Return the factor from exponentials to probabilities; with a cap, the log of the sum of exponentials."""
    return log_sum if to_logits.softcap else factor / total


def loss_grad_(
    logits: torch.Tensor,
    labels: torch.Tensor,
    num_columns: int,
    kept: torch.Tensor,
    scale: torch.Tensor,
    to_logits: LogitMap = PRODUCTS,
) -> torch.Tensor:
    """Compute in place of the tensor that `loss_sums` has left in `logits`."""
    columns, mine = _local(labels, num_columns)
    scale = scale * to_logits.factor
    picked = (-scale).masked_fill_(~mine, 0)[:, None]
    if to_logits.softcap:
        for part in _chunks(logits, temporary=True):
            tanh = to_logits.tanh(logits[part])  # -1 for padding, so that its derivative is 0
            probabilities = (tanh * to_logits.softcap).sub_(kept[part, None]).exp_()
            grad = probabilities.mul_(scale[part, None]).scatter_add_(-1, columns[part, None], picked[part])
            logits[part] = grad.mul_(tanh.square_().neg_().add_(1))
        return logits
    picked, factor = picked.to(logits.dtype), (kept * scale).to(logits.dtype)[:, None]
    for part in _chunks(logits):
        logits[part].mul_(factor[part]).scatter_add_(-1, columns[part, None], picked[part])
    return logits


def _chunks(logits: torch.Tensor, temporary: bool = False) -> list[slice]:
    """Return the rows that are computed together. temporary: in a tensor besides the logits."""
    rows, on_cpu = len(logits), logits.device.type == "cpu"
    if is_stand_in(logits) or not (on_cpu or temporary):
        return [slice(0, rows)]  # few, large kernels
    most = LOGIT_CHUNK_BYTES if on_cpu else TEMPORARY_BYTES
    each = max(1, most // (logits.shape[1] * logits.element_size()))
    return [slice(at, min(at + each, rows)) for at in range(0, rows, each)]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x [.., h] -> x / rms(x) * weight, 1 / rms(x) [.., 1]. Sums and quotients are in fp32, or fp64 of fp64."""
    exact = x.to(wide(x))
    rstd = exact.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (exact * rstd).to(x.dtype).mul_(weight), rstd


def rms_norm_grad(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of x [T, h], plus `residual`, and of the weight."""
    normed, dy = x.to(rstd.dtype) * rstd, dy.to(rstd.dtype)
    dweight = (dy * normed).sum(0)
    dnormed = dy * weight.to(rstd.dtype)
    mean = (dnormed * normed).mean(-1, keepdim=True)
    dx = dnormed.sub_(normed.mul_(mean)).mul_(rstd)
    return _plus(dx.to(x.dtype), residual), dweight


def _plus(made: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    return made if residual is None else made.add_(residual)


def layer_norm_grad(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of x [T, h], plus `residual`, of the weight and of the bias."""
    dx, dweight, dbias = _LAYER_NORM_BACKWARD(dy, x, x.shape[-1:], mean, rstd, weight, bias, _ALL)
    return _plus(dx, residual), dweight, dbias


_LAYER_NORM_BACKWARD = torch.ops.aten.native_layer_norm_backward.default
_ALL = (True, True, True)  # gradients of x, weight and bias


def rotary(given: Tensors, results: Tensors, tables: RotaryTables, positions: torch.Tensor | None, back: bool) -> None:
    """Rotate queries and keys into `results`, and copy values: three tensors [b, s, heads, d] each."""
    q, k, v = given
    tables = tables.at(positions, q.shape[1])
    rotate(q, tables, back, results[0])
    rotate(k, tables, back, results[1])
    results[2].copy_(v)


def add_rows(table: torch.Tensor, rows: torch.Tensor, mine: torch.Tensor, values: torch.Tensor) -> None:
    """table [v, h] += values [T, h] at `rows` [T], which may repeat, where `mine`; the same bits every time.

    On a GPU `index_add_` adds with atomics, in any order, but an accumulating `index_put_` sorts the rows first. On a
    CPU both add in order, and `index_add_` is faster.
    """
    values = values.masked_fill(~mine[:, None], 0).to(table.dtype)  # selecting rows would wait for the GPU
    if table.device.type == "cpu":
        table.index_add_(0, rows, values)
    else:
        table.index_put_((rows,), values, accumulate=True)
