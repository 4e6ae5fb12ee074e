"""Architectures by name; `model.architectures.table` has their layers. To add one: see docs/extending.md."""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """An architecture, as far as it can be told without torch.

    Attributes:
        options: flags, without dashes, that its layers read and not every architecture's do.
        mlp_matrices: of hidden size x ffn size in a block.
        defaults: flags whose defaults are others for it. They lie under those of the preset.
    """

    mlp_matrices: int
    options: tuple[str, ...] = ()
    defaults: tuple[str, ...] = ()


ROTARY = ("rotary-base", "rope-scaling-factor")
ARCHITECTURES = {
    "gpt2": Entry(2),
    "llama": Entry(
        3,
        ("num-query-groups", "add-qkv-bias", *ROTARY),
        ("--untie-embeddings", "--norm-epsilon", "1e-6"),
    ),
    "parallel": Entry(2, ("num-query-groups", "add-qkv-bias", *ROTARY)),
}
