"""Names that torch does not declare public. No other module uses one, except `cluster.elastic.node_agent`.

- Attention kernels: torch's public function returns no log-sums of scores, with which parts of attention are merged,
  and has no backward below autograd. Stand-in tensors choose no kernel, and so a trace names one.
- oneDNN's product: torch has no public switch between oneDNN and MKL for fp32.
- Modes and trees: the documented way to watch operators, without a public module up to torch 2.14.
- The default store: the public way to it is the argument of `init_process_group`, which torchrun fills.
"""

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["TorchDispatchMode", "default_store", "fake_tensors", "storage_id", "tree_leaves"]

CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
CPU_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
FLASH_ATTENTION = torch.ops.aten._flash_attention_forward
FLASH_ATTENTION_BACKWARD = torch.ops.aten._flash_attention_backward
TRACED_FLASH_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention
TRACED_EFFICIENT_ATTENTION = torch.ops.aten._scaled_dot_product_efficient_attention


@functools.cache
def grouped(varlen_attn: Callable[..., Any]) -> dict[str, bool]:
    """Return the argument with which it accepts fewer heads of keys than of queries.

    torch 2.11 has no such argument and no such check; its kernel accepts them. Not yet run on a GPU.
    """
    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def has_onednn() -> bool:
    """Return whether `onednn_linear` works in this torch."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return F.linear of fp32 tensors on a CPU, by oneDNN: x [.., in], weight [out, in] -> [.., out]."""
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


def fake_tensors() -> AbstractContextManager[Any]:
    """Return a mode in which new tensors have shapes and types, and no data. Its import takes a second."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def storage_id(x: torch.Tensor) -> int:
    """Return a number that tensors of one storage share while it is alive."""
    number: int = x.untyped_storage()._cdata
    return number


def default_store() -> dist.Store:
    """Return the store of the default process group."""
    return dist.distributed_c10d._get_default_store()
