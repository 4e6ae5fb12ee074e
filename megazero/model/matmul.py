"""Matrix products: output, input gradient, weight gradient."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megazero.model.context import write_or_add

# See Note [oneDNN].
PREFERS_ONEDNN = (
    torch.backends.mkldnn.is_available()
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
)


def upcasts(x: torch.Tensor) -> bool:
    """16-bit products on a CPU: fp32 ones with casts around are some 60 times faster, and no less exact."""
    return x.device.type == "cpu" and x.element_size() == 2


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
    if upcasts(x):
        return _affine(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
    return _affine(x, weight, bias)


def input_grad(dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[.., out] -> [.., in]"""
    if upcasts(dy):
        return _affine(dy.float(), weight.float().t()).to(dy.dtype)
    return _affine(dy, weight.t())


def weight_grad(x: torch.Tensor, dy: torch.Tensor, out: torch.Tensor, add: bool) -> None:
    """out [out, in] (+)= dy.T @ x, into the flat buffer."""
    x, dy, out = x.flatten(0, -2), dy.flatten(0, -2), as_matrix(out)
    if (
        x.device.type == "cpu" and x.dtype != torch.float64 and PREFERS_ONEDNN
    ):  # faster, with the copy, than MKL in place
        write_or_add(out, add, _affine(dy.float().t(), x.float().t()))
    elif x.dtype == out.dtype and not upcasts(x):
        if add:
            out.addmm_(dy.t(), x)
        else:
            torch.mm(dy.t(), x, out=out)
    elif upcasts(x):
        write_or_add(out, add, dy.float().t() @ x.float())
    else:  # a GPU multiplies in 16 bit, and sums and returns fp32
        write_or_add(out, add, torch.mm(dy.t(), x, out_dtype=out.dtype))


def as_matrix(weight: torch.Tensor) -> torch.Tensor:
    """[heads, 3, d, h] -> [heads * 3 * d, h]; a matrix stays what it is."""
    return weight.flatten(0, -2) if weight.dim() > 2 else weight
