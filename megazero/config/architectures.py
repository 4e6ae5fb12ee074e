"""Architectures by name; `model.architectures.table` has their layers. To add one: see docs/extending.md."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class ArchitectureTraits(NamedTuple):
    """The part of an architecture that can be described without torch.

    Attributes:
        options: flags that its layers read, and that some other architecture does not have.
        defaults: flags whose defaults differ for it. A preset overrides them.
    """

    options: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = MappingProxyType({})


ROTARY = ("num-query-groups", "add-qkv-bias", "qk-layernorm", "qk-norm-all-heads", "rotary-base", "rope-scaling-factor")
LLAMA = {"untie-embeddings": True, "norm-epsilon": 1e-6}
ARCHITECTURES = {
    "gpt2": ArchitectureTraits(),
    "llama": ArchitectureTraits(ROTARY, LLAMA),
    "qwen3": ArchitectureTraits(ROTARY, LLAMA | {"qk-layernorm": True, "rotary-base": 1e6}),
    "parallel": ArchitectureTraits(ROTARY),
}
