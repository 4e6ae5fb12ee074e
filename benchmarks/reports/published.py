"""Shapes and speeds of published runs, as their papers print them: the one place where reports find them."""

from typing import NamedTuple


class ZeroRun(NamedTuple):
    """A run of the ZeRO paper's appendix (arXiv 1910.02054 v3).

    `tflops` per GPU of Figure 2, read from the figure, +-0.1. The paper states neither sequence length nor vocabulary.
    """

    model: str
    gpus: int
    tp: int
    layers: int
    hidden: int
    heads: int
    micro_batch: int  # samples of a model-parallel group
    tflops: float | None = None


FIGURE_2_ZERO = [
    ZeroRun("1.5B", 400, 1, 48, 1600, 16, 24, 30.3),
    ZeroRun("8B", 400, 4, 72, 3072, 24, 64, 36.9),
    ZeroRun("40B", 400, 4, 88, 6144, 32, 12, 35.9),
    ZeroRun("60B", 400, 16, 132, 6144, 32, 64, 36.5),
    ZeroRun("80B", 400, 16, 100, 8192, 64, 32, 37.6),
    ZeroRun("100B", 400, 16, 125, 8192, 64, 32, 38.7),
    ZeroRun("120B", 400, 16, 150, 8192, 64, 24, 28.2),
    ZeroRun("140B", 400, 16, 175, 8192, 64, 16, 26.9),
    ZeroRun("170B", 400, 16, 212, 8192, 64, 12, 20.9),
]
FIGURE_2_BASELINE = [
    ZeroRun("1.5B", 400, 2, 48, 1600, 16, 16, 26.3),
    ZeroRun("8B", 400, 8, 72, 3072, 24, 8, 23.2),
    ZeroRun("40B", 384, 32, 88, 6144, 64, 4, 5.0),
    ZeroRun("60B", 384, 64, 132, 6144, 64, 4, 6.4),
    ZeroRun("80B", 384, 128, 100, 8192, 128, 4, 5.2),
    ZeroRun("100B", 384, 128, 125, 8192, 128, 2, 3.8),
    ZeroRun("120B", 384, 128, 150, 8192, 128, 2, 3.8),
    ZeroRun("140B", 384, 128, 175, 8192, 128, 2, 3.9),
    ZeroRun("170B", 256, 256, 212, 8192, 256, 2, 2.2),
]
FIGURE_3 = [ZeroRun("60B", gpus, 16, 75, 8192, 32, b) for gpus, b in ((64, 16), (128, 48), (256, 48), (400, 64))]
FIGURE_4 = [  # data parallelism alone, with Pos+g
    ZeroRun("1.5B", 128, 1, 34, 1920, 16, 24),
    ZeroRun("2.5B", 128, 1, 54, 1920, 16, 24),
    ZeroRun("4B", 128, 1, 64, 2304, 24, 16),
    ZeroRun("6B", 128, 1, 52, 3072, 24, 12),
    ZeroRun("8B", 128, 1, 72, 3072, 24, 8),
    ZeroRun("10B", 128, 1, 50, 4096, 32, 6),
    ZeroRun("11B", 128, 1, 54, 4096, 32, 4),
    ZeroRun("12B", 128, 1, 58, 4096, 32, 4),
    ZeroRun("13B", 128, 1, 62, 4096, 32, 2),
]
FIGURE_4_BASELINE = [ZeroRun("1.16B", 128, 1, 24, 1920, 16, 8), ZeroRun("1.38B", 128, 1, 40, 1536, 16, 1)]
# configuration of Table 3 -> the largest model that it trains: Figure 6
FIGURE_6 = {
    1: ZeroRun("40B", 400, 16, 50, 8192, 32, 16),
    2: ZeroRun("60B", 400, 16, 132, 6144, 64, 16),
    3: ZeroRun("50B", 400, 16, 62, 8192, 32, 16),
    4: ZeroRun("140B", 400, 16, 175, 8192, 64, 16),
    5: ZeroRun("150B", 400, 16, 187, 8192, 64, 16),
}
FIGURE_7 = [ZeroRun("40B", 400, 16, 50, 8192, 32, 16), ZeroRun("100B", 400, 16, 125, 8192, 64, 32)]
CONFIGURATIONS = {1: "Pos", 2: "Pos, Pa", 3: "Pos+g", 4: "Pos+g, Pa", 5: "Pos+g, Pa+cpu"}  # all with CB and MD


class MegatronRun(NamedTuple):
    """A row of Narayanan 2021 (arXiv 2104.04473), table 1: A100-80GB, sequence 2048, vocabulary 51200.

    `tflops` per GPU counts recompute: 96 B s L h^2 (1 + s/6h + V/16Lh).
    """

    model: str
    layers: int
    hidden: int
    heads: int
    tp: int
    pp: int
    gpus: int
    batch: int
    tflops: float


NARAYANAN = [
    MegatronRun("18.4B", 40, 6144, 48, 8, 1, 256, 1024, 135),
    MegatronRun("76.1B", 60, 10240, 80, 8, 4, 1024, 1792, 140),
    MegatronRun("145.6B", 80, 12288, 96, 8, 8, 1536, 2304, 148),
    MegatronRun("1008B", 128, 25600, 160, 8, 64, 3072, 3072, 163),
]


class TrainedRun(NamedTuple):
    """A run as its authors published it: `flags` make its model, its layout and its program here.

    One of `tokens`, per second of all devices, and `tflops`, per device, counted as Megatron-LM does: attention
    without its causal mask, recompute not.

    Attributes:
        recomputed: share of a full recompute that its selective one takes.
        loss_bytes: bytes that its loss moves for each logit, above those of ours.
        late_gathers: the backward of a block begins with the all-gather of its weights, not overlapped.
    """

    name: str
    source: str
    device: str  # of scripts/devices, or of `VARIANTS` of benchmarks.reports.planned
    gpus: int
    flags: str
    tokens: float = 0.0
    tflops: float = 0.0
    recomputed: float = 0.0
    loss_bytes: int = 0
    late_gathers: bool = False


# karpathy/llm.c scripts/run_gpt2_*.sh; mosaicml/llm-foundry scripts/train/benchmarking; pytorch/torchtitan
# benchmarks/llama3_h100_202412_torchtitan.md, and docs/performance.md before that; foundation-model-stack/fms-fsdp
# README. Alps' layout is from pull request 33: "MBS 4, SEQLEN 4096, TP 2"; its vocabulary is assumed.
LLM_C = "llm.c, scripts"
MOSAIC = "llm-foundry, benchmarking"
TITAN = "torchtitan, benchmarks"
SWISS = "swiss-ai/Megatron-LM, pull request 29"
LLAMA = "--architecture llama --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --untie-embeddings"
LLAMA_3_8B = f"{LLAMA} --ffn-hidden-size 14336 --num-query-groups 8 --precision bf16"
ALPS = f"{LLAMA_3_8B} --vocab-size 131072 --seq-length 4096 --tensor-model-parallel-size 2 --sequence-parallel"
FSDP = f"{LLAMA_3_8B} --vocab-size 128256 --seq-length 8192 --zero-stage 3"
EAGER = "--fused-kernels eager"
# HSDP; gradients are reduced in bf16
IBM = (
    f"{LLAMA} --vocab-size 32000 --seq-length 4096 --zero-stage 3 --zero-shard-size 8 --precision bf16 "
    f"--grad-dtype bf16 {EAGER}"
)
IBM_13B = f"{IBM} --num-layers 40 --hidden-size 5120 --num-attention-heads 40 --ffn-hidden-size 13824"
# torch's cross-entropy moves 36 bytes a logit: to fp32 (2 + 4), softmax (8), gradients of the loss (4) and of the
# softmax (12), to bf16 (6). Ours, eager, moves 16.
CROSS_ENTROPY = 20


def _gpt2(preset: str, micro_batch: int, batch: int) -> str:
    return f"--preset {preset} --micro-batch-size {micro_batch} --global-batch-size {batch} --zero-stage 1"


def _mpt(
    size: str, length: int, card: str, layout: tuple[int, int, int], tokens: float, recompute: str = "none"
) -> TrainedRun:
    """Return a run of an MPT model: its shape is GPT-2's, its numbers of parameters too.

    Composer's default is FSDP's BACKWARD_POST, which issues the next all-gather after the block's gradients.

    Args:
        layout: GPUs, micro-batch, global batch.
    """
    (layers, hidden, heads), (gpus, micro_batch, batch) = MPT[size], layout
    flags = (
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --seq-length {length} "
        f"--vocab-size 50368 --micro-batch-size {micro_batch} --global-batch-size {batch} --precision bf16 "
        f"--zero-stage 3 --recompute {recompute} {EAGER}"
    )
    name = f"MPT {size}, {length // 1024}k" + (", recompute" if recompute == "full" else "")
    card = f"{card}, FlashAttention 1"
    return TrainedRun(name, MOSAIC, card, gpus, flags, tokens, loss_bytes=CROSS_ENTROPY, late_gathers=True)


# size -> layers, hidden size, heads
MPT = {
    "125M": (12, 768, 12),
    "350M": (24, 1024, 16),
    "760M": (24, 1536, 12),
    "1B": (24, 2048, 16),
    "3B": (32, 2560, 20),
    "7B": (32, 4096, 32),
    "13B": (40, 5120, 40),
    "30B": (48, 7168, 56),
}
GPT2_774M = "--num-layers 36 --hidden-size 1280 --num-attention-heads 20"
TRAINED = [
    TrainedRun(
        "GPT-2 124M, 10 B tokens in 45 minutes",
        "modded-nanogpt, README, of llm.c",
        "h100-80gb",
        8,
        _gpt2("gpt2-124m", 64, 512),
        10e9 / 2700,
    ),
    TrainedRun(
        "GPT-2 1558M, 1 M tokens in 2.80 s", LLM_C, "h100-80gb", 8, _gpt2("gpt2-1.5b", 16, 1024), 1_048_576 / 2.8
    ),
    TrainedRun("GPT-2 124M", LLM_C, "a100-80gb", 8, _gpt2("gpt2-124m", 64, 512), 524_288 / 0.3),
    TrainedRun("GPT-2 350M", LLM_C, "a100-80gb", 8, _gpt2("gpt2-345m", 64, 512), 524_288 / 0.82),
    TrainedRun("GPT-2 774M", LLM_C, "a100-80gb", 8, f"{_gpt2('gpt2-1.5b', 32, 512)} {GPT2_774M}", 524_288 / 1.7),
    *(
        TrainedRun("Llama 3 8B, tp 2", SWISS, "gh200", n, f"{ALPS} --micro-batch-size 4 --global-batch-size 512", 0, t)
        for n, t in ((64, 430), (128, 413))
    ),
    *(
        TrainedRun(
            f"Llama 3 8B, {'eager' if kernels else 'compiled'}",
            TITAN,
            "h100-500w",
            gpus,
            f"{FSDP} --micro-batch-size 2 --global-batch-size {2 * gpus} {kernels}",
            gpus * tokens,
            recomputed=0.5,
            loss_bytes=CROSS_ENTROPY * bool(kernels),
        )
        for gpus, kernels, tokens in ((8, "", 6667), (128, "", 6514), (8, EAGER, 5762), (128, EAGER, 5605))
    ),
    *(
        TrainedRun(
            f"Llama 3 8B, eager, {what} recompute",
            "torchtitan, performance",
            "a100-80gb",
            64,
            f"{FSDP} --micro-batch-size 1 --global-batch-size 64 {EAGER}",
            64 * tokens,
            recomputed=0.5,
            loss_bytes=CROSS_ENTROPY,
        )
        for what, tokens in (("selective", 2973), ("every second layer's", 2904))
    ),
    *(
        TrainedRun(name, "fms-fsdp, README", "a100-400g", 128, flags, 128 * tokens, loss_bytes=CROSS_ENTROPY)
        for name, flags, tokens in (
            ("Llama 2 7B", f"{IBM} --ffn-hidden-size 11008 --micro-batch-size 2 --global-batch-size 256", 3760),
            ("Llama 2 13B", f"{IBM_13B} --micro-batch-size 1 --global-batch-size 128", 1700),
        )
    ),
    _mpt("760M", 1024, "h100", (8, 48, 768), 628_648),
    _mpt("1B", 2048, "h100", (8, 14, 112), 363_645),
    _mpt("3B", 1024, "h100", (8, 20, 960), 216_369),
    _mpt("7B", 2048, "h100", (8, 6, 48), 85_144),
    _mpt("13B", 2048, "h100", (8, 2, 16), 38_336),
    _mpt("13B", 2048, "h100", (64, 2, 128), 307_209),
    _mpt("30B", 2048, "h100", (16, 10, 480), 36_209, "full"),
    _mpt("125M", 1024, "a100", (8, 64, 1024), 1_251_751),
    _mpt("350M", 1024, "a100", (8, 64, 1024), 518_504),
    _mpt("760M", 2048, "a100", (8, 24, 384), 259_472),
    _mpt("1B", 2048, "a100", (8, 14, 448), 164_109),
    _mpt("3B", 1024, "a100", (8, 20, 960), 92_643),
    _mpt("3B", 8192, "a100", (8, 3, 144), 61_567),
    _mpt("7B", 2048, "a100", (8, 6, 96), 37_130),
    _mpt("7B", 1024, "a100", (8, 64, 1024), 34_857, "full"),
    _mpt("13B", 2048, "a100", (8, 2, 48), 18_097),
]


class CardRun(NamedTuple):
    """Tokens per second and GPU of a model on newer cards.

    Attributes:
        model: of `MODELS`.
        layout: its flags, as far as they are published.
        tokens: in bf16; 0 if there is no such run.
        narrower: of the fastest run in 8 or 4 bits, and their name.
    """

    model: str
    device: str
    gpus: int
    batch: int
    layout: str
    tokens: int = 0
    source: str = ""
    narrower: str = ""


# NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md and its archive, by container (in 8 and 4 bits: 26.04.01 to
# 26.08); NVIDIA-NeMo/Automodel, docs/performance-summary.md of October 2025. Both balance experts by force. DeepSeek-V3
# is without multi-token prediction, as in Megatron-Bridge's runs in bf16.
BRIDGE, AUTOMODEL = "Megatron-Bridge {}", "Automodel"
MODELS = {
    "Llama 3 70B, 8k": "--preset llama-70b --vocab-size 128256 --seq-length 8192",
    "Llama 3.1 405B, 8k": (
        "--architecture llama --num-layers 126 --hidden-size 16384 --num-attention-heads 128 --num-query-groups 8 "
        "--ffn-hidden-size 53248 --vocab-size 128256 --seq-length 8192 --untie-embeddings --precision bf16"
    ),
    "DeepSeek-V3": "--preset deepseek-v3-671b",
    "GPT-OSS 120B": "--preset gpt-oss-120b",
    "Qwen3-30B-A3B": "--preset qwen3-30b-a3b",
    "Qwen3-235B-A22B": (
        "--architecture qwen3-moe --num-layers 94 --hidden-size 4096 --num-attention-heads 64 --num-query-groups 4 "
        "--kv-channels 128 --moe-ffn-hidden-size 1536 --vocab-size 151936 --seq-length 4096 --precision bf16"
    ),
}


def _axes(micro: int, pp: int = 1, chunks: int = 1, ep: int = 1, *, tp: int = 1, cp: int = 1, zero: int = 1) -> str:
    flags = f"--zero-stage {zero} --tensor-model-parallel-size {tp} --context-parallel-size {cp}"
    flags += f" --pipeline-model-parallel-size {pp} --micro-batch-size {micro}"
    schedule = f"interleaved --virtual-pipeline-stages {chunks}" if chunks > 1 else "1f1b"
    return f"{flags} --pipeline-schedule {schedule}" + (f" --expert-model-parallel-size {ep}" if ep > 1 else "")


GPT_OSS, SMALL_QWEN, DEEPSEEK, QWEN = "GPT-OSS 120B", "Qwen3-30B-A3B", "DeepSeek-V3", "Qwen3-235B-A22B"
LLAMA_70B, LLAMA_405B = "Llama 3 70B, 8k", "Llama 3.1 405B, 8k"
CARD_RUNS = [
    CardRun(GPT_OSS, "gb300", 64, 1280, _axes(4, ep=64), 19200, BRIDGE.format("26.04.01"), "33,024 MXFP8"),
    CardRun(GPT_OSS, "gb200", 64, 1280, _axes(4, ep=64), 16640, BRIDGE.format("26.04.01"), "28,672 MXFP8"),
    CardRun(GPT_OSS, "b300", 64, 1280, _axes(4, ep=8), 15232, BRIDGE.format("26.04.01"), "18,534 MXFP8"),
    CardRun(GPT_OSS, "b200", 64, 1280, _axes(4, ep=8), 13568, BRIDGE.format("26.04.01")),
    CardRun(GPT_OSS, "h100-80gb", 64, 1280, _axes(1, 4, 1, 8), 5824, BRIDGE.format("26.04.01")),
    CardRun(SMALL_QWEN, "gb300", 8, 512, _axes(8, ep=8), narrower="44,544 MXFP8"),
    CardRun(SMALL_QWEN, "gb200", 8, 512, _axes(4, ep=8), narrower="39,936 MXFP8"),
    CardRun(SMALL_QWEN, "b300", 8, 512, _axes(8, ep=8), narrower="40,769 MXFP8"),
    CardRun(SMALL_QWEN, "b200", 8, 512, _axes(4, ep=8), narrower="27,136 MXFP8"),
    CardRun(SMALL_QWEN, "h100-80gb", 8, 512, _axes(4, ep=8, zero=3), 12040, AUTOMODEL),
    CardRun(DEEPSEEK, "gb300", 256, 4096, _axes(1, 2, 4, 32), 3848, BRIDGE.format("25.11"), "6,288 MXFP8"),
    CardRun(DEEPSEEK, "gb200", 256, 4096, _axes(1, 4, 4, 64), 3139, BRIDGE.format("25.11"), "4,912 MXFP8"),
    CardRun(DEEPSEEK, "b300", 256, 4096, _axes(2, 8, 1, 8), narrower="3,541 MXFP8"),
    CardRun(DEEPSEEK, "b200", 256, 4096, _axes(1, 8, 2, 32), narrower="3,328 MXFP8"),
    CardRun(DEEPSEEK, "h100-80gb", 256, 512, _axes(1, 4, 8, 64, zero=3), 1002, AUTOMODEL),
    CardRun(QWEN, "gb300", 256, 8192, _axes(2, 4, 12, 16), 6131, BRIDGE.format("25.11"), "8,816 MXFP8"),
    CardRun(QWEN, "gb200", 256, 8192, _axes(1, 8, 3, 32), 4916, BRIDGE.format("25.11"), "7,280 MXFP8"),
    CardRun(QWEN, "b300", 256, 8192, _axes(2, 8, 1, 8), narrower="5,936 MXFP8"),
    CardRun(QWEN, "b200", 256, 8192, _axes(1, 8, 1, 8), narrower="3,776 MXFP8"),
    CardRun(QWEN, "h100-80gb", 256, 8192, _axes(1, 8, 4, 32, tp=2), narrower="1,712 FP8"),
    CardRun(LLAMA_70B, "gb300", 64, 256, _axes(1, 4, 5), narrower="7,296 NVFP4"),
    CardRun(LLAMA_70B, "gb200", 64, 256, _axes(1, 4, 5, tp=2), narrower="4,864 NVFP4"),
    CardRun(LLAMA_70B, "h100-80gb", 64, 256, _axes(1, 8, 5, tp=4), narrower="1,664 FP8"),
    CardRun(LLAMA_405B, "gb300", 256, 1536, _axes(1, 8, 4, tp=4), narrower="1,413 NVFP4"),
    CardRun(LLAMA_405B, "gb200", 256, 1536, _axes(1, 16, 7, tp=4), narrower="1,166 NVFP4"),
    CardRun(LLAMA_405B, "h100-80gb", 1024, 1536, _axes(1, 8, 8, tp=8, cp=2), narrower="326 FP8"),
]
