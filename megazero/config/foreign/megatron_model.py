"""Megatron-LM's flags of the model."""

from __future__ import annotations

from megazero.config.foreign.table import (
    MEGATRON,
    Entries,
    Refused,
    Use,
    alias,
    computed,
    fixed,
    refused,
    switch,
    unneeded,
)

# -- the architecture, which Megatron-LM gives in parts

LLAMA = {
    "swiglu": "--swiglu",
    "norm": "--normalization RMSNorm",
    "rope": "--position-embedding-type rope",
    "no-bias": "--disable-bias-linear",
}  # what Megatron-LM's llama is made of -> how it is written there


def _parts(use: Use) -> dict[str, bool]:
    """Return which parts of a llama the command line asks for; False stands for GPT-2's."""
    words = {name: values[0].lower() if len(values) == 1 else "" for name, values in use.foreign.items()}
    on = {name for name, word in words.items() if word not in ("false", "no")}
    return {
        "swiglu": "swiglu" in on,
        "norm": words.get("normalization", "layernorm") == "rmsnorm",
        "rope": words.get("position-embedding-type", "") == "rope" or "use-rotary-position-embeddings" in on,
        "no-bias": "disable-bias-linear" in on,
    }


def is_llama(use: Use) -> bool:
    """Return whether the run is a llama's, by Megatron-LM's flags or by ours; refused where it is half of one."""
    parts = _parts(use)
    given = use.get("architecture") if use.given("architecture") else ""
    if given == "llama":
        against = {"norm": "normalization", "rope": "position-embedding-type"}
        if "add-bias-linear" in use.foreign or any(against[p] in use.foreign and not parts[p] for p in against):
            raise Refused("it does not go with --architecture llama; drop it")
        return True
    if any(parts.values()) and not all(parts.values()):
        missing = " ".join(words for part, words in LLAMA.items() if not parts[part])
        there = " ".join(words for part, words in LLAMA.items() if parts[part])
        raise Refused(f"{there} without {missing}: --architecture llama has all four, gpt2 none; give all, or drop all")
    if given and all(parts.values()):
        raise Refused(f"it does not go with --architecture {given}; drop it")
    return all(parts.values())


def _architecture(use: Use) -> list[str]:
    llama = is_llama(use)
    if not llama or use.given("architecture"):
        return []
    words = ["--architecture", "llama"]
    if not use.foreign.keys() & {"untie-embeddings-and-output-weights"} and not use.given("untie-embeddings"):
        words += ["--no-untie-embeddings"]  # as in Megatron-LM, where a llama is tied unless it is told otherwise
    if not use.given("norm-epsilon"):
        words += ["--norm-epsilon", "1e-5"]
    if not use.get_whole("ffn-hidden-size"):
        words += ["--ffn-hidden-size", str(int(4 * use.get_whole("hidden-size") * 2 / 3 / 64) * 64)]
    return words


def _normalization(use: Use) -> list[str]:
    if use.value.lower() not in ("rmsnorm", "layernorm"):
        raise Refused(f"{use.value}: there are RMSNorm (--architecture llama) and LayerNorm (gpt2)")
    return _architecture(use)


def _positions(use: Use) -> list[str]:
    if use.value.lower() not in ("rope", "learned_absolute"):
        raise Refused(f"{use.value}: there are rope (--architecture llama) and learned_absolute (gpt2)")
    return _architecture(use)


def _max_positions(use: Use) -> list[str]:
    rotary = use.given("architecture") and use.get("architecture") != "gpt2"
    if not rotary and use.whole() != use.get_whole("seq-length"):
        raise Refused(
            f"{use.value} is not --seq-length {use.get('seq-length')}, and there is a learned position for each token "
            "of a sample; give both the same value"
        )
    return []


def _groups(use: Use) -> list[str]:
    return [] if not use.on() or use.given("num-query-groups") else ["--num-query-groups", "1"]


def _head_size(use: Use) -> list[str]:
    if use.whole() * use.get_whole("num-attention-heads") != use.get_whole("hidden-size"):
        raise Refused("a head's size is --hidden-size / --num-attention-heads, no other; drop it")
    return []


def _rope_scaling(use: Use) -> list[str]:
    return [] if not use.on() or use.given("rope-scaling-factor") else ["--rope-scaling-factor", "8"]


_ARCHITECTURE = "with the other three parts of a llama, --architecture llama"
MODEL: Entries = (
    *computed(MEGATRON, "swiglu use-rotary-position-embeddings disable-bias-linear", _ARCHITECTURE, _architecture, 1),
    *computed(MEGATRON, "normalization", f"RMSNorm: {_ARCHITECTURE}; LayerNorm: gpt2", _normalization, 1),
    *computed(MEGATRON, "position-embedding-type", f"rope: {_ARCHITECTURE}; learned_absolute: gpt2", _positions, 1),
    *unneeded(MEGATRON, "add-bias-linear", "--architecture gpt2, the default, has biases"),
    *unneeded(MEGATRON, "no-position-embedding no-add-position-embedding", "rotary positions have no table"),
    *switch(MEGATRON, "untie-embeddings-and-output-weights", "--untie-embeddings"),
    *computed(MEGATRON, "group-query-attention", "--num-query-groups, 1 unless it is given", _groups),
    *alias(MEGATRON, "num-key-value-heads num-kv-heads", "num-query-groups"),
    *alias(MEGATRON, "layernorm-epsilon", "norm-epsilon"),
    *alias(MEGATRON, "encoder-num-layers", "num-layers"),
    *alias(MEGATRON, "encoder-seq-length context-length", "seq-length"),
    *computed(MEGATRON, "kv-channels", "nothing, where it is --hidden-size / --num-attention-heads", _head_size, 2),
    *computed(
        MEGATRON,
        "max-position-embeddings",
        "nothing, where it is --seq-length or positions are rotary",
        _max_positions,
        2,
    ),
    *computed(MEGATRON, "use-rope-scaling", "--rope-scaling-factor, 8 unless it is given", _rope_scaling),
    *fixed(
        MEGATRON,
        "rotary-percent rotary-seq-len-interpolation-factor",
        "1",
        "all of a head is rotated, by --rotary-base",
    ),
    *unneeded(
        MEGATRON,
        "make-vocab-size-divisible-by padded-vocab-size pad-vocab-size-to",
        "padding is added inside and changes no result",
    ),
    *unneeded(MEGATRON, "openai-gelu", "GPT-2's GELU is OpenAI's, by tanh"),
    *unneeded(MEGATRON, "apply-layernorm-1p", "a norm's weights do not decay, so that w and 1 + w train alike"),
    *unneeded(
        MEGATRON,
        "attention-softmax-in-fp32 apply-query-key-layer-scaling no-query-key-layer-scaling",
        "attention's softmax is in fp32",
    ),
    *unneeded(
        MEGATRON, "use-flash-attn* attention-backend", "fused attention is always on, wherever there is a kernel"
    ),
    *unneeded(
        MEGATRON, "use-mcore-models use-legacy-models transformer-impl", "there is one implementation of a layer"
    ),
    *unneeded(MEGATRON, "use-cpu-initialization lazy-mpu-init", "initial weights are the same on every device"),
    *refused(MEGATRON, "squared-relu quick-geglu", "an MLP has GELU (--architecture gpt2) or SwiGLU (llama); drop it"),
    *refused(
        MEGATRON,
        "embed-layernorm apply-residual-connection-post-layernorm qk-layernorm fp32-residual-connection window-size "
        "multi-latent-attention q-lora-rank kv-lora-rank init-method-xavier-uniform spec hybrid-* heterogeneous-* "
        "relative-attention-* yarn-* no-rope-freq window-attn-skip-freq mtp-num-layers qk-clip experimental-* "
        "decoder-num-layers linear-attention-freq attention-output-gate softmax-type",
        "no --architecture has it; docs/add-an-architecture.md says how to add one",
    ),
)
