"""Shapes and speeds of published runs, as their papers print them: the one place where reports find them."""

from __future__ import annotations

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
    """A run as its authors published it: `flags` make its model and layout here.

    One of `tokens`, per second of all devices, and `tflops`, per device, counted as Megatron-LM does: attention
    without its causal mask, recompute not.
    """

    name: str
    source: str
    device: str  # of scripts/devices, or of `VARIANTS` of benchmarks.reports.planned
    gpus: int
    flags: str
    tokens: float = 0.0
    tflops: float = 0.0
    chose: bool = False  # the low end of a constant: the device file names which


# karpathy/llm.c scripts/run_gpt2_*.sh; mosaicml/llm-foundry scripts/train/benchmarking; pytorch/torchtitan
# benchmarks/llama3_h100_202412_torchtitan.md. Alps' layout is from pull request 33: "MBS 4, SEQLEN 4096, TP 2"; its
# vocabulary is assumed.
LLM_C = "llm.c, scripts"
MOSAIC = "llm-foundry, benchmarking"
TITAN = "torchtitan, benchmarks"
SWISS = "swiss-ai/Megatron-LM, pull request 29"
LLAMA_3_8B = (
    "--architecture llama --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    "--num-query-groups 8 --untie-embeddings --precision bf16"
)
ALPS = f"{LLAMA_3_8B} --vocab-size 131072 --seq-length 4096 --tensor-model-parallel-size 2 --sequence-parallel"
FSDP = f"{LLAMA_3_8B} --vocab-size 128256 --seq-length 8192 --zero-stage 3"


def _gpt2(preset: str, micro_batch: int, batch: int) -> str:
    return f"--preset {preset} --micro-batch-size {micro_batch} --global-batch-size {batch} --zero-stage 1"


def _mpt(layers: int, hidden: int, heads: int, length: int, micro_batch: int, batch: int) -> str:
    """Return flags of an MPT model: its shape is GPT-2's, its numbers of parameters too."""
    return (
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --seq-length {length} "
        f"--vocab-size 50368 --micro-batch-size {micro_batch} --global-batch-size {batch} --precision bf16 "
        "--zero-stage 3"
    )


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
    TrainedRun(
        "Llama 3 8B, tp 2", SWISS, "gh200", 64, f"{ALPS} --micro-batch-size 4 --global-batch-size 512", 0, 430, True
    ),
    TrainedRun("Llama 3 8B, tp 2", SWISS, "gh200", 128, f"{ALPS} --micro-batch-size 4 --global-batch-size 512", 0, 413),
    TrainedRun(
        "Llama 3 8B, compiled", TITAN, "h100-500w", 8, f"{FSDP} --micro-batch-size 2 --global-batch-size 16", 8 * 6667
    ),
    TrainedRun(
        "Llama 3 8B, compiled",
        TITAN,
        "h100-500w",
        128,
        f"{FSDP} --micro-batch-size 2 --global-batch-size 256",
        128 * 6514,
    ),
    TrainedRun(
        "Llama 3 8B, eager", TITAN, "h100-500w", 8, f"{FSDP} --micro-batch-size 2 --global-batch-size 16", 8 * 5762
    ),
    TrainedRun("MPT 760M, 1k", MOSAIC, "h100-80gb", 8, _mpt(24, 1536, 12, 1024, 48, 768), 613_628),
    TrainedRun("MPT 1B, 2k", MOSAIC, "h100-80gb", 8, _mpt(24, 2048, 16, 2048, 14, 112), 363_645),
    TrainedRun("MPT 3B, 1k", MOSAIC, "h100-80gb", 8, _mpt(32, 2560, 20, 1024, 20, 960), 216_369),
    TrainedRun("MPT 7B, 2k", MOSAIC, "h100-80gb", 8, _mpt(32, 4096, 32, 2048, 6, 48), 85_144),
    TrainedRun("GPT-2 124M", LLM_C, "a100-80gb", 8, _gpt2("gpt2-124m", 64, 512), 524_288 / 0.3),
    TrainedRun("GPT-2 350M", LLM_C, "a100-80gb", 8, _gpt2("gpt2-345m", 64, 512), 524_288 / 0.82),
    TrainedRun("GPT-2 774M", LLM_C, "a100-80gb", 8, f"{_gpt2('gpt2-1.5b', 32, 512)} {GPT2_774M}", 524_288 / 1.7),
    TrainedRun("MPT 125M, 1k", MOSAIC, "a100-80gb", 8, _mpt(12, 768, 12, 1024, 64, 1024), 1_251_751),
    TrainedRun("MPT 350M, 1k", MOSAIC, "a100-80gb", 8, _mpt(24, 1024, 16, 1024, 64, 1024), 518_504),
    TrainedRun("MPT 760M, 2k", MOSAIC, "a100-80gb", 8, _mpt(24, 1536, 12, 2048, 24, 384), 259_472),
    TrainedRun("MPT 1B, 2k", MOSAIC, "a100-80gb", 8, _mpt(24, 2048, 16, 2048, 14, 448), 164_109),
    TrainedRun("MPT 3B, 1k", MOSAIC, "a100-80gb", 8, _mpt(32, 2560, 20, 1024, 20, 960), 92_643),
    TrainedRun("MPT 3B, 8k", MOSAIC, "a100-80gb", 8, _mpt(32, 2560, 20, 8192, 3, 144), 61_567),
    TrainedRun("MPT 7B, 2k", MOSAIC, "a100-80gb", 8, _mpt(32, 4096, 32, 2048, 6, 96), 37_130, 0, True),
    TrainedRun("MPT 13B, 2k", MOSAIC, "a100-80gb", 8, _mpt(40, 5120, 40, 2048, 2, 48), 18_097),
]
