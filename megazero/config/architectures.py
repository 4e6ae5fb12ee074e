"""Architectures by name. To add one: its module, a line here, presets; see docs/add-an-architecture.md."""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """An architecture, as far as it can be told without torch.

    Attributes:
        module: its ARCHITECTURE says which layers a model is made of. By name, since configurations and plans import no
            torch, and a run imports only its own.
        options: flags, without dashes, that its layers read and not every architecture's do.
        mlp_matrices: of hidden size x ffn size in a block.
        defaults: flags whose defaults are others for it. They lie under those of the preset.
    """

    module: str
    mlp_matrices: int
    options: tuple[str, ...] = ()
    defaults: tuple[str, ...] = ()


ROTARY = ("rotary-base", "rope-scaling-factor")
ARCHITECTURES = {
    "gpt2": Entry("megazero.model.gpt2", 2),
    "llama": Entry(
        "megazero.model.llama",
        3,
        ("num-query-groups", "add-qkv-bias", *ROTARY),
        ("--untie-embeddings", "--norm-epsilon", "1e-6"),
    ),
    "parallel": Entry("megazero.model.parallel", 2, ("num-query-groups", "add-qkv-bias", *ROTARY)),
}
