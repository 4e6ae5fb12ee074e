"""Architectures: each is a row of traits, from which `model.block` builds its layers. To add one: docs/extending.md."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Self

NormName = Literal["layernorm", "rmsnorm", "rmsnorm-1p"]
ActivationName = Literal["gelu", "gelu-tanh", "relu", "squared-relu", "swiglu", "geglu-tanh", "swiglu-clamped"]

ROTARY = (
    *("num-query-groups", "add-qkv-bias", "qk-layernorm", "qk-norm-all-heads"),
    *("rotary-base", "rotary-percent", "rotary-interleaved", "local-rotary-base"),
    *("rope-scaling-factor", "rope-scaling-type", "rope-trained-length", "beta-fast", "mscale", "mscale-all-dim"),
    "yarn-correction-range-round-to-int",
)
# Latent attention has no biases, and comes before the MLP.
LATENT = ("multi-latent-attention", "q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim")


class ArchitectureTraits(NamedTuple):
    """The traits of an architecture, and its defaults of flags.

    Attributes:
        norm: kind of all norms. rmsnorm-1p multiplies by 1 + weight.
        norms: where they are in a branch of a block: x + branch(norm(x)), x + norm(branch(x)), or both ("around").
        parallel: norms of a block whose attention and MLP read the same x, as in x + attention(norm(x)) +
            mlp(norm(x)): 1 if they share it, 2 if each has its own. 0: attention, then the MLP.
        activation: of the MLP, unless --activation is given; swiglu, geglu-tanh and swiglu-clamped multiply a value by
            the activation of a gate.
        biases: linear layers that have biases: qkv, proj (of attention), mlp, experts (with their router), logits (the
            output matrix).
        sinks: each head has an attention sink.
        fused_qkv: queries, keys and values are one weight.
        learned_positions: a table of positions is added to the embeddings; otherwise positions are rotary.
        root_embedding: embeddings are multiplied by sqrt(hidden size).
        options: flags that its layers read, and that some other architecture does not have.
        defaults: flags whose defaults differ for it. A preset overrides them.
    """

    norm: NormName = "rmsnorm"
    norms: Literal["before", "after", "around"] = "before"
    parallel: Literal[0, 1, 2] = 0
    activation: ActivationName = "swiglu"
    biases: tuple[Literal["qkv", "proj", "mlp", "experts", "logits"], ...] = ()
    sinks: bool = False
    fused_qkv: bool = False
    learned_positions: bool = False
    root_embedding: bool = False
    options: tuple[str, ...] = ROTARY
    defaults: Mapping[str, Any] = MappingProxyType({})

    @property
    def structure(self) -> Self:
        """The traits without flags: two architectures with the same are the same model for the same flags."""
        return self._replace(options=(), defaults={})


def _with(row: ArchitectureTraits, defaults: Mapping[str, Any], **traits: Any) -> ArchitectureTraits:
    """Return `row` with other traits, and with `defaults` besides its own."""
    return row._replace(defaults={**row.defaults, **defaults}, **traits)


LLAMA = ArchitectureTraits(options=ROTARY + LATENT, defaults={"untie-embeddings": True, "norm-epsilon": 1e-6})
OLMO2 = _with(LLAMA, {"rotary-base": 5e5, "qk-layernorm": True, "qk-norm-all-heads": True}, norms="after")
GEMMA = ArchitectureTraits(
    norm="rmsnorm-1p",
    norms="around",
    activation="geglu-tanh",
    root_embedding=True,
    defaults={"norm-epsilon": 1e-6, "kv-channels": 256},
)
DEEPSEEK = _with(LLAMA, {"multi-latent-attention": True, "rotary-interleaved": True})
SIGMOID = {"moe-router-score-function": "sigmoid", "moe-router-enable-expert-bias": True}
GPTJ = ArchitectureTraits(norm="layernorm", parallel=1, activation="gelu-tanh", biases=("mlp",))
ARCHITECTURES = {
    "gpt2": ArchitectureTraits(
        norm="layernorm",
        activation="gelu-tanh",
        biases=("qkv", "proj", "mlp"),
        fused_qkv=True,
        learned_positions=True,
        options=(),
    ),
    "llama": LLAMA,
    "mistral": _with(LLAMA, {"rotary-base": 1e6, "norm-epsilon": 1e-5}),
    "qwen2": _with(LLAMA, {"rotary-base": 1e6, "add-qkv-bias": True}),
    "qwen3": _with(LLAMA, {"rotary-base": 1e6, "qk-layernorm": True}),
    "qwen2-moe": _with(
        LLAMA,
        {"rotary-base": 1e6, "add-qkv-bias": True, "num-experts": 60, "moe-router-topk": 4}
        | {"moe-router-pre-softmax": True, "moe-shared-expert-gate": True},
    ),
    "qwen3-moe": _with(LLAMA, {"rotary-base": 1e6, "qk-layernorm": True, "num-experts": 128, "moe-router-topk": 8}),
    "mixtral": _with(LLAMA, {"rotary-base": 1e6, "norm-epsilon": 1e-5, "num-experts": 8}),
    "olmoe": _with(
        LLAMA,
        {"norm-epsilon": 1e-5, "qk-layernorm": True, "qk-norm-all-heads": True, "num-experts": 64}
        | {"moe-router-topk": 8, "moe-router-pre-softmax": True},
    ),
    "deepseek-v2": _with(DEEPSEEK, {"moe-router-pre-softmax": True}),
    "deepseek-v3": _with(DEEPSEEK, SIGMOID),
    "glm4-moe": _with(
        LLAMA, SIGMOID | {"rotary-base": 1e6, "rotary-percent": 0.5, "norm-epsilon": 1e-5, "add-qkv-bias": True}
    ),
    "gpt-oss": ArchitectureTraits(
        activation="swiglu-clamped",
        biases=("qkv", "proj", "experts"),
        sinks=True,
        defaults={"untie-embeddings": True, "kv-channels": 64, "window-size": 128, "layer-pattern": "LG"}
        | {"rotary-base": 1.5e5, "rope-scaling-factor": 32.0, "rope-scaling-type": "yarn", "rope-trained-length": 4096}
        | {"yarn-correction-range-round-to-int": False, "num-experts": 32, "moe-router-topk": 4},
    ),
    "glm4": _with(
        LLAMA,
        {"norm-epsilon": 1e-5, "rotary-percent": 0.5, "rotary-interleaved": True},
        norms="around",
        options=ROTARY,
    ),
    "phi3": _with(LLAMA, {"norm-epsilon": 1e-5}),
    "smollm3": _with(LLAMA, {"rotary-base": 5e6, "layer-pattern": "GGGN", "untie-embeddings": False}),
    "granite": _with(LLAMA, {"norm-epsilon": 1e-5, "untie-embeddings": False}),
    "olmo2": OLMO2,
    "olmo3": _with(OLMO2, {"window-size": 4096, "layer-pattern": "LLLG", "local-rotary-base": 5e5}),
    "gemma": GEMMA._replace(norms="before"),
    "gemma2": _with(
        GEMMA, {"window-size": 4096, "layer-pattern": "LG", "attention-softcap": 50.0, "final-softcap": 30.0}
    ),
    "gemma3": _with(
        GEMMA,
        {"window-size": 1024, "layer-pattern": "LLLLLG", "rotary-base": 1e6, "local-rotary-base": 1e4}
        | {"qk-layernorm": True},
    ),
    "gpt-neox": ArchitectureTraits(
        norm="layernorm",
        parallel=2,
        activation="gelu",
        biases=("qkv", "proj", "mlp"),
        defaults={"untie-embeddings": True, "rotary-percent": 0.25},
    ),
    "gptj": _with(
        GPTJ,
        {"untie-embeddings": True, "rotary-percent": 0.25, "rotary-interleaved": True},
        biases=("mlp", "logits"),
    ),
    "stablelm": ArchitectureTraits(norm="layernorm", defaults={"untie-embeddings": True, "rotary-percent": 0.25}),
    "starcoder2": ArchitectureTraits(
        norm="layernorm",
        activation="gelu-tanh",
        biases=("qkv", "proj", "mlp"),
        defaults={"rotary-base": 1e6},
    ),
    "parallel": GPTJ,
}
