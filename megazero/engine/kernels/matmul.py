"""Matrix products of a linear layer: output, input gradient, weight gradient; on a CPU by MKL or oneDNN.

Note [oneDNN]: torch's own fp32 products are MKL's. On AMD's CPUs with AVX-512 they reach half the speed of oneDNN's; on
Intel's, oneDNN takes twice as long for both gradients (docs/log). The operator is private to torch, which uses it in
compiled models, so it is used only where it is measured to be faster. The two differ in the last bits.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megazero.torch_private import onednn_linear


@dataclass(frozen=True)
class Products:
    """The three products of a linear layer.

    Attributes:
        onednn: fp32 products on a CPU by oneDNN; see Note [oneDNN].
        in_place: a GPU writes and adds 16-bit products into fp32 gradients without a temporary; see `writes_wide`.
    """

    onednn: bool = False
    in_place: bool = False

    def output(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[.., in] -> [.., out]"""
        if upcasts(x):
            return self._affine(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
        return self._affine(x, weight, bias)

    def input_grad(self, dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[.., out] -> [.., in]"""
        if upcasts(dy):
            return self._affine(dy.float(), weight.float().t()).to(dy.dtype)
        return self._affine(dy, weight.t()) if self._by_onednn(dy) else dy @ weight

    def weight_grad(self, x: torch.Tensor, dy: torch.Tensor, out: torch.Tensor, add: bool) -> None:
        """Write dy.T @ x to out [out, in] in the flat buffer, or add it."""
        x, dy, out = x.flatten(0, -2), dy.flatten(0, -2), as_matrix(out)
        if upcasts(x):
            x, dy = x.float(), dy.float()
        if self._by_onednn(x):
            write_or_add(self._affine(dy.t(), x.t()), out, add)
        elif x.dtype == out.dtype:
            if add:
                out.addmm_(dy.t(), x)
            else:
                torch.mm(dy.t(), x, out=out)
        elif x.device.type == "cpu" or x.element_size() > out.element_size():  # a router's factors are fp32
            write_or_add(dy.t() @ x, out, add)
        elif not self.in_place:  # 16-bit factors; the sum and the result are fp32
            write_or_add(torch.mm(dy.t(), x, out_dtype=out.dtype), out, add)
        elif add:
            torch.addmm(out, dy.t(), x, out_dtype=out.dtype, out=out)
        else:
            torch.mm(dy.t(), x, out_dtype=out.dtype, out=out)

    def _by_onednn(self, x: torch.Tensor) -> bool:
        return self.onednn and x.device.type == "cpu" and x.dtype == torch.float32

    def _affine(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """F.linear: x [.., in], weight [out, in] -> [.., out]."""
        if self._by_onednn(x):
            return onednn_linear(x, weight, bias)
        return F.linear(x, weight, bias)


TORCH = Products()


def upcasts(x: torch.Tensor) -> bool:
    """Return whether to cast to fp32: on a CPU 16-bit products are some 60 times slower, and no more exact."""
    return x.element_size() == 2 and x.device.type == "cpu"


def writes_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether products of `dtype` can be written and added to fp32 tensors without a temporary.

    Tries it on the device, because some supported versions of torch refuse it.
    """
    if device.type == "cpu" or dtype.itemsize != 2:
        return False
    ones, out = torch.ones(16, 16, dtype=dtype, device=device), torch.zeros(16, 16, device=device)
    products = Products(in_place=True)
    try:
        products.weight_grad(ones, ones, out, add=False)
        products.weight_grad(ones, ones, out, add=True)
    except (RuntimeError, TypeError):
        return False
    return device.type == "meta" or bool((out == 32).all())


def as_matrix(weight: torch.Tensor) -> torch.Tensor:
    """[.., h] -> [rows, h]"""
    return weight.flatten(0, -2) if weight.dim() > 2 else weight


def write_or_add(gradient: torch.Tensor, out: torch.Tensor, add: bool) -> None:
    """`out` has as many elements, perhaps in another shape or type."""
    if gradient.dim() != out.dim():
        gradient = gradient.view(out.shape)
    if add:
        out.add_(gradient)
    else:
        out.copy_(gradient)
