"""Architectures by name; `model.architectures.table` has their layers. To add one: see docs/extending.md."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class ArchitectureTraits(NamedTuple):
    """The part of an architecture that can be described without torch.

    Attributes:
        mlp_matrices: number of matrices of hidden size x ffn size in a block.
        options: flags that its layers read, and that some other architecture does not have.
        defaults: flags whose defaults differ for it. A preset overrides them.
    """

    mlp_matrices: int
    options: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = MappingProxyType({})


ROTARY = ("num-query-groups", "add-qkv-bias", "rotary-base", "rope-scaling-factor")
ARCHITECTURES = {
    "gpt2": ArchitectureTraits(2),
    "llama": ArchitectureTraits(3, ROTARY, {"untie-embeddings": True, "norm-epsilon": 1e-6}),
    "parallel": ArchitectureTraits(2, ROTARY),
}
