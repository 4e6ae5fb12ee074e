"""Architectures: each is a row of traits, from which `model.block` builds its layers. To add one: docs/extending.md."""

from typing import Literal, NamedTuple

NormName = Literal["layernorm", "rmsnorm", "rmsnorm-1p"]
ActivationName = Literal["gelu", "gelu-tanh", "relu", "squared-relu", "swiglu", "geglu-tanh", "swiglu-clamped"]


class ArchitectureTraits(NamedTuple):
    """The traits of an architecture. `flags.architecture_flags` has its flags.

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


LLAMA = ArchitectureTraits()
GEMMA = ArchitectureTraits(norm="rmsnorm-1p", norms="around", activation="geglu-tanh", root_embedding=True)
GPTJ = ArchitectureTraits(norm="layernorm", parallel=1, activation="gelu-tanh", biases=("mlp",))
BIASED = ArchitectureTraits(norm="layernorm", activation="gelu-tanh", biases=("qkv", "proj", "mlp"))
ARCHITECTURES = {
    "gpt2": BIASED._replace(fused_qkv=True, learned_positions=True),
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "qwen2-moe": LLAMA,
    "qwen3-moe": LLAMA,
    "mixtral": LLAMA,
    "olmoe": LLAMA,
    "deepseek-v2": LLAMA,
    "deepseek-v3": LLAMA,
    "glm4-moe": LLAMA,
    "gpt-oss": ArchitectureTraits(activation="swiglu-clamped", biases=("qkv", "proj", "experts"), sinks=True),
    "glm4": LLAMA._replace(norms="around"),
    "phi3": LLAMA,
    "smollm3": LLAMA,
    "granite": LLAMA,
    "olmo2": LLAMA._replace(norms="after"),
    "olmo3": LLAMA._replace(norms="after"),
    "gemma": GEMMA._replace(norms="before"),
    "gemma2": GEMMA,
    "gemma3": GEMMA,
    "gpt-neox": BIASED._replace(parallel=2, activation="gelu"),
    "gptj": GPTJ._replace(biases=("mlp", "logits")),
    "stablelm": ArchitectureTraits(norm="layernorm"),
    "starcoder2": BIASED,
    "parallel": GPTJ,
}
