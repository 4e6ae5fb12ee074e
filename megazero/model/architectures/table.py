"""The layers of each architecture, by the name that `config.architectures` gives it."""

from __future__ import annotations

from megazero.model.architectures import gpt2, llama, parallel
from megazero.model.layers.block import Architecture

ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": gpt2.ARCHITECTURE,
    "llama": llama.ARCHITECTURE,
    "qwen3": llama.ARCHITECTURE,
    "parallel": parallel.ARCHITECTURE,
}
