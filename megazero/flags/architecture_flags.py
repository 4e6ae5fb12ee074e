"""Flags of architectures: those that their layers read, and their defaults. Next to it, the engine has their traits."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

ROTARY = (
    *("num-query-groups", "add-qkv-bias", "qk-layernorm", "qk-norm-all-heads"),
    *("rotary-base", "rotary-percent", "rotary-interleaved", "local-rotary-base"),
    *("rope-scaling-factor", "rope-scaling-type", "rope-trained-length", "beta-fast", "mscale", "mscale-all-dim"),
    "yarn-correction-range-round-to-int",
)
# Latent attention has no biases, and comes before the MLP.
LATENT = ("multi-latent-attention", "q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim")


class ArchitectureFlags(NamedTuple):
    """The flags of an architecture.

    Attributes:
        defaults: flags whose defaults differ for it. A preset overrides them.
        options: flags that its layers read, and that some other architecture does not have.
    """

    defaults: Mapping[str, Any] = MappingProxyType({})
    options: tuple[str, ...] = ROTARY


def _llama(defaults: Mapping[str, Any] = MappingProxyType({})) -> ArchitectureFlags:
    """Return the flags of a relative of Llama: its defaults, and `defaults` besides."""
    return ArchitectureFlags({"untie-embeddings": True, "norm-epsilon": 1e-6, **defaults}, ROTARY + LATENT)


OLMO2 = {"rotary-base": 5e5, "qk-layernorm": True, "qk-norm-all-heads": True}
GEMMA = {"norm-epsilon": 1e-6, "kv-channels": 256}
DEEPSEEK = {"multi-latent-attention": True, "rotary-interleaved": True}
SIGMOID = {"moe-router-score-function": "sigmoid", "moe-router-enable-expert-bias": True}
ARCHITECTURE_FLAGS = {
    "gpt2": ArchitectureFlags(options=()),
    "llama": _llama(),
    "mistral": _llama({"rotary-base": 1e6, "norm-epsilon": 1e-5}),
    "qwen2": _llama({"rotary-base": 1e6, "add-qkv-bias": True}),
    "qwen3": _llama({"rotary-base": 1e6, "qk-layernorm": True}),
    "qwen2-moe": _llama(
        {"rotary-base": 1e6, "add-qkv-bias": True, "num-experts": 60, "moe-router-topk": 4}
        | {"moe-router-pre-softmax": True, "moe-shared-expert-gate": True}
    ),
    "qwen3-moe": _llama({"rotary-base": 1e6, "qk-layernorm": True, "num-experts": 128, "moe-router-topk": 8}),
    "mixtral": _llama({"rotary-base": 1e6, "norm-epsilon": 1e-5, "num-experts": 8}),
    "olmoe": _llama(
        {"norm-epsilon": 1e-5, "qk-layernorm": True, "qk-norm-all-heads": True, "num-experts": 64}
        | {"moe-router-topk": 8, "moe-router-pre-softmax": True}
    ),
    "deepseek-v2": _llama(DEEPSEEK | {"moe-router-pre-softmax": True}),
    "deepseek-v3": _llama(DEEPSEEK | SIGMOID),
    "glm4-moe": _llama(
        SIGMOID | {"rotary-base": 1e6, "rotary-percent": 0.5, "norm-epsilon": 1e-5, "add-qkv-bias": True}
    ),
    "gpt-oss": ArchitectureFlags(
        {"untie-embeddings": True, "kv-channels": 64, "window-size": 128, "layer-pattern": "LG"}
        | {"rotary-base": 1.5e5, "rope-scaling-factor": 32.0, "rope-scaling-type": "yarn", "rope-trained-length": 4096}
        | {"yarn-correction-range-round-to-int": False, "num-experts": 32, "moe-router-topk": 4}
    ),
    "glm4": _llama({"norm-epsilon": 1e-5, "rotary-percent": 0.5, "rotary-interleaved": True})._replace(options=ROTARY),
    "phi3": _llama({"norm-epsilon": 1e-5}),
    "smollm3": _llama({"rotary-base": 5e6, "layer-pattern": "GGGN", "untie-embeddings": False}),
    "granite": _llama({"norm-epsilon": 1e-5, "untie-embeddings": False}),
    "olmo2": _llama(OLMO2),
    "olmo3": _llama(OLMO2 | {"window-size": 4096, "layer-pattern": "LLLG", "local-rotary-base": 5e5}),
    "gemma": ArchitectureFlags(GEMMA),
    "gemma2": ArchitectureFlags(
        GEMMA | {"window-size": 4096, "layer-pattern": "LG", "attention-softcap": 50.0, "final-softcap": 30.0}
    ),
    "gemma3": ArchitectureFlags(
        GEMMA
        | {"window-size": 1024, "layer-pattern": "LLLLLG", "rotary-base": 1e6, "local-rotary-base": 1e4}
        | {"qk-layernorm": True}
    ),
    "gpt-neox": ArchitectureFlags({"untie-embeddings": True, "rotary-percent": 0.25}),
    "gptj": ArchitectureFlags({"untie-embeddings": True, "rotary-percent": 0.25, "rotary-interleaved": True}),
    "stablelm": ArchitectureFlags({"untie-embeddings": True, "rotary-percent": 0.25}),
    "starcoder2": ArchitectureFlags({"rotary-base": 1e6}),
}


def flags_of(architecture: str | None) -> ArchitectureFlags:
    """Return the flags of an architecture; without a row it has rotary positions, and no defaults of its own."""
    return ARCHITECTURE_FLAGS.get(architecture or "", ArchitectureFlags())
