"""Megatron-LM's switches that have another name here, and what to give instead. docs/megatron.md is the same table."""

from __future__ import annotations

from collections.abc import Container

# Megatron's switch -> what does the same here.
INSTEAD = {
    "swiglu": "--architecture llama, which has SwiGLU",
    "normalization": "--architecture llama for RMSNorm, gpt2 for LayerNorm",
    "position-embedding-type": "--architecture llama for rope, gpt2 for learned_absolute",
    "use-rotary-position-embeddings": "--architecture llama, which has rotary positions",
    "use-rope-scaling": "--rope-scaling-factor 8, as llama 3.1 has it",
    "group-query-attention": "--num-query-groups N alone",
    "disable-bias-linear": "--architecture llama, which has no biases",
    "add-bias-linear": "--architecture gpt2, which has biases",
    "untie-embeddings-and-output-weights": "--untie-embeddings; --architecture llama does it anyway",
    "layernorm-epsilon": "--norm-epsilon",
    "kv-channels": "--hidden-size / --num-attention-heads: a head has no other size",
    "max-position-embeddings": "--seq-length",
    "make-vocab-size-divisible-by": "nothing: padding is added inside and changes no result",
    "padded-vocab-size": "--vocab-size, without padding",
    "bf16": "--precision bf16",
    "fp16": "--precision fp16",
    "use-distributed-optimizer": "--zero-stage 1",
    "overlap-grad-reduce": "nothing: it is on, unless --no-overlap-comm",
    "overlap-param-gather": "nothing: it is on, unless --no-overlap-comm",
    "recompute-granularity": "--recompute full or selective",
    "recompute-method": "--recompute full, for every block",
    "recompute-num-layers": "--recompute full, for every block",
    "distribute-saved-activations": "--partition-activations",
    "num-layers-per-virtual-pipeline-stage": "--pipeline-schedule interleaved --virtual-pipeline-stages N",
    "use-flash-attn": "nothing: a fused kernel is used wherever there is one",
    "attention-softmax-in-fp32": "nothing: it is",
    "tokenizer-type": "--tokenizer, a Hugging Face folder, gpt2:DIR, sentencepiece:FILE.model, tiktoken:FILE or byte",
    "tokenizer-model": "--tokenizer, a Hugging Face folder, or sentencepiece:FILE.model",
    "vocab-file": "--tokenizer gpt2:DIR",
    "merge-file": "--tokenizer gpt2:DIR",
    "lr-warmup-samples": "--lr-warmup-iters",
    "train-samples": "--train-iters",
    "override-opt-param-scheduler": "nothing: a resumed run's schedule comes from its flags",
    "use-checkpoint-opt-param-scheduler": "the flags of the run that is resumed, from which its schedule comes",
}


def answer_megatron(argv: list[str], known: Container[str]) -> None:
    """Refuse a switch of Megatron's that is no flag of ours.

    Raises:
        ValueError: naming what to give instead.
    """
    for arg in argv:
        name = arg.removeprefix("--").partition("=")[0].replace("_", "-")
        if arg.startswith("--") and name in INSTEAD and name not in known:
            raise ValueError(f"--{name} is Megatron-LM's; here it is {INSTEAD[name]}")
