"""Flags that decide the results and the work of a step: model, batches, optimizer, layout, ZeRO and activations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from megazero.config.architectures import ARCHITECTURES
from megazero.config.limits import (
    FEW,
    Bounds,
    DecayRate,
    Iterations,
    LearningRate,
    LossScaleValue,
    Positive,
    Probability,
    Ranks,
)
from megazero.config.optimizers import BYTES, OPTIMIZERS, UpdateRule
from megazero.plan.schedule.schedules import SCHEDULES

__all__ = ["BYTES"]

Precision = Literal["fp32", "bf16", "fp16", "fp64"]

if TYPE_CHECKING:
    ScheduleName = str
    ArchitectureName = str
else:
    ScheduleName = Literal[tuple(SCHEDULES)]  # --help lists the choices
    ArchitectureName = Literal[tuple(ARCHITECTURES)]


@dataclass(frozen=True)
class ModelConfig:
    """Architecture and sizes."""

    num_layers: Annotated[int, Bounds(1, 4096, FEW)] = 12
    """Transformer blocks."""
    hidden_size: Annotated[int, Bounds(1, 2**20, "no published model is as wide")] = 768
    """Width of the residual stream."""
    ffn_hidden_size: Annotated[int, Bounds(0, 2**23, "no published model is as wide")] = 0
    """Width inside the MLP. 0: 4 x --hidden-size."""
    num_attention_heads: Annotated[int, Bounds(1, 2**20, FEW)] = 12
    """Attention heads; must divide --hidden-size."""
    seq_length: Annotated[int, Bounds(1, 2**24, "attention over more tokens is not feasible")] = 1024
    """Tokens of a sample; with --architecture gpt2 also the number of learned positions."""
    vocab_size: Annotated[int, Bounds(0, 2**31 - 1, "token ids are stored in 32 bits")] = 0
    """Vocabulary. 0: that of --tokenizer. Padding is added inside and changes no result."""
    attention_dropout: Probability = 0.0
    """Dropout probability of attention weights."""
    hidden_dropout: Probability = 0.0
    """Dropout probability of the embedding and of both residual branches."""
    init_method_std: Annotated[float, Bounds(0, 10, "GPT-2 uses 0.02, and products of larger weights overflow")] = 0.02
    """Standard deviation of the initial weights; residual projections / sqrt(2 x --num-layers)."""
    untie_embeddings: bool = False
    """Give the head an output matrix of its own instead of the token table."""
    architecture: ArchitectureName = "gpt2"
    """gpt2: learned positions, LayerNorm, tanh GELU, biases, tied embeddings. llama: rotary positions, RMSNorm, SwiGLU,
    grouped-query attention, no biases, untied embeddings. parallel: GPT-J's attention and MLP side by side, rotary."""
    num_query_groups: Annotated[int, Bounds(0, 2**20, FEW)] = 0
    """Not gpt2: groups of attention heads that share keys and values. 0: one per head."""
    rotary_base: Annotated[float, Bounds(0, 1e12, "no published model has a longer wavelength", least_open=True)] = 1e4
    """Not gpt2: base of the rotary positions' wavelengths; llama 3: 500000."""
    rope_scaling_factor: Annotated[float, Bounds(1, 1e6, "no published model is stretched as far")] = 1.0
    """Not gpt2: llama 3.1's scaling of long wavelengths, for contexts longer than 8192. 1: none."""
    add_qkv_bias: bool = False
    """Not gpt2: biases of queries, keys and values, as in Qwen 2."""
    norm_epsilon: Annotated[float, Bounds(0, 1, "it only keeps a norm's divisor from 0", least_open=True)] = 1e-5
    """Added to the variance in a norm. llama: 1e-6 unless it is given."""

    @property
    def ffn_size(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def residual_std(self) -> float:
        """Standard deviation of weights that write to the residual stream, whose variance then stays put with depth."""
        return self.init_method_std / math.sqrt(2 * self.num_layers)


@dataclass(frozen=True)
class TrainingConfig:
    """Duration, batches and precision."""

    micro_batch_size: Annotated[int, Bounds(1, 2**20, "a rank computes all of its samples at once")] = 1
    """Samples per forward pass of a rank."""
    global_batch_size: Annotated[int, Bounds(0, 2**30, "published batches are thousands of samples")] = 0
    """Samples per iteration, over all ranks. Any number: where the ranks cannot share it equally, the first have a
    micro-batch more, and the others compute padding that counts nowhere. 0: --micro-batch-size x data-parallel
    ranks."""
    rampup_batch_size: tuple[int, ...] = ()
    """START INCREMENT SAMPLES: begin with a global batch of START, and raise it by INCREMENT in equal stretches of the
    first SAMPLES samples, to --global-batch-size."""
    train_iters: Positive = 1000
    """Iterations to train, counted from the first run."""
    seed: Annotated[int, Bounds(-(2**63), 2**63 - 1, "seeds are 64-bit")] = 1234
    """Seed of initial weights, data order and dropout. The same seed gives the same run in every layout."""
    precision: Precision = "fp32"
    """Precision of weights and activations; master weights and moments are fp32. Unless it is given, it is bf16 on GPUs
    that have it, and fp16 on older ones with tensor cores. fp16 scales the loss. fp64 is for tests and debugging: all
    of a run, gradients, moments and checkpoints included, is fp64; it starts from the same weights as fp32."""
    grad_dtype: Precision = "fp32"
    """Precision in which gradients are accumulated and reduced. With --precision fp64, and only there, it is fp64."""
    freeze_parameters: tuple[str, ...] = ()
    """Do not train parameters whose names match these patterns, such as token_embedding.* or blocks.[01].*"""
    initial_loss_scale: LossScaleValue = 65536.0
    """fp16: the loss is multiplied with this at first."""
    min_loss_scale: LossScaleValue = 1.0
    """fp16: an overflow at this scale ends the run, after saving."""
    loss_scale_window: Positive = 1000
    """fp16: iterations without an overflow after which the scale doubles."""
    hysteresis: Positive = 2
    """fp16: overflows until the scale halves."""
    max_skipped_iterations: Iterations = 50
    """End the run, with an error, when this many iterations in a row made no update. 0: never."""
    matmul_backend: Literal["auto", "torch", "onednn"] = "auto"
    """Library of fp32 matrix products on a CPU. auto: the faster by a measurement at the start. They differ in the last
    bits: to resume bit for bit on another machine, give what plan.txt of the first run says."""
    tf32: bool = True
    """fp32 matrix products on a GPU in TensorFloat-32: several times faster, with 10 bits of mantissa instead of 23.
    Without effect in other precisions and on a CPU."""
    deterministic_mode: bool = False
    """On a GPU, use deterministic algorithms of torch, cuBLAS and NCCL, so that the same layout on the same GPUs gives
    the same bits, also after a resume; attention's backward is slower. Not yet run on a GPU. A CPU always repeats its
    bits, given the same --matmul-backend."""
    compile: bool = False
    """torch.compile the element-wise parts of a block that no fused kernel computes: GELU and SwiGLU, except in Triton
    (--fused-kernels), and attention's softmax where it has dropout or a precision without a kernel of torch (bf16 on a
    CPU, fp64 on a GPU). Starting takes longer."""
    cuda_graph_impl: Literal["none", "local"] = "none"
    """GPU: local captures the forward and the backward of each block as CUDA graphs, once for every micro-batch in
    flight, and replays each by one call: for steps that the host holds up (small micro-batches). All activations are
    allocated from the first step on. Not with --zero-stage 3, tensor parallelism, dropout, --recompute full,
    zero-bubble schedules, documents, or --compile. Not yet run on a GPU."""
    fused_kernels: Literal["auto", "triton", "eager"] = "auto"
    """GPU: triton has norms, GELU, SwiGLU, rotary positions, dropout with its residual sum, and the loss over the
    vocabulary in kernels of its own, compiled at their first use; eager takes torch's operators, several passes over
    memory each. auto: triton where it works, and not in fp64. Masks are the same bit for bit."""

    def kernels_on(self, device_type: str) -> str:
        """Return the kernels of a device, triton or eager. Any device but a CPU is, or stands for, a GPU."""
        if self.fused_kernels != "auto":
            return self.fused_kernels
        return "eager" if device_type == "cpu" or self.precision == "fp64" else "triton"


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW; biases and norms do not decay."""

    lr: LearningRate = 3e-4
    """Peak learning rate."""
    min_lr: LearningRate = 0.0
    """Learning rate at the end of the decay."""
    lr_warmup_iters: Iterations = 0
    """Iterations of linear warm-up; iteration i has lr x i / this. On GPUs, unless it is given: 1 % of the
    iterations, at most 2000."""
    lr_decay_iters: Iterations = 0
    """Iteration at which --min-lr is reached. 0: --train-iters."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "wsd"] = "constant"
    """Shape of the decay after warm-up. inverse-square-root: --lr x sqrt(--lr-warmup-iters / iteration), at least
    --min-lr. wsd: stable at --lr, then down to --min-lr in the last --lr-wsd-decay-iters of --lr-decay-iters."""
    lr_wsd_decay_iters: Iterations = 0
    """--lr-decay-style wsd: iterations of the decay at the end; a tenth of the run is usual."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """--lr-decay-style wsd: shape of the decay at the end, with d from 0 to 1 in it: 2 x 0.5^d - 1, 1 - d,
    (1 + cos(pi d)) / 2 or 1 - sqrt(d)."""
    weight_decay: Annotated[float, Bounds(0, 1000, "usual values are between 0 and 1")] = 0.01
    """Decoupled weight decay of matrices."""
    adam_beta1: DecayRate = 0.9
    """Decay rate of the first moment."""
    adam_beta2: DecayRate = 0.999
    """Decay rate of the second moment."""
    adam_eps: Annotated[float, Bounds(0, 1, "it only keeps the update's divisor from 0", least_open=True)] = 1e-8
    """Added to the root of the second moment."""
    clip_grad: Annotated[float, Bounds(0, 1e9, "no gradient norm is as large; 0 turns clipping off")] = 1.0
    """Clip gradients to this global L2 norm. 0: never."""

    @property
    def rule(self) -> UpdateRule:
        return OPTIMIZERS["adamw"]


@dataclass(frozen=True)
class ParallelConfig:
    """Division of the model over ranks. Data-parallel ranks = all ranks / (tensor x pipeline)."""

    tensor_model_parallel_size: Ranks = 1
    """Ranks that share every matrix of a layer."""
    pipeline_model_parallel_size: Ranks = 1
    """Stages that share the layers."""
    pipeline_schedule: ScheduleName = "1f1b"
    """Order of forwards and backwards. gpipe keeps the activations of all micro-batches, 1f1b of as many as there are
    stages. interleaved divides the idle time of 1f1b by the virtual stages per rank, and sends more messages.
    zero-bubble (ZB-H1) computes weight gradients where 1f1b waits, for a third of its idle time; zero-bubble-v (ZB-V)
    has a sixth, with two virtual stages per rank, the first and the last of all on the first rank."""
    virtual_pipeline_stages: Annotated[int, Bounds(1, 4096, "each holds at least one layer")] = 1
    """--pipeline-schedule interleaved, or zero-bubble-v, which takes 2: chunks of layers per pipeline rank."""
    pipeline_split: str = ""
    """Layers of each virtual pipeline stage, in the order of the forward, such as 4,4,3,1. Empty: so that the busiest
    rank computes least, with the head counted."""
    zero_bubble_backlog: Annotated[int, Bounds(0, 10**6, "no rank has as many micro-batches")] = 0
    """--pipeline-schedule zero-bubble, zero-bubble-v: micro-batches whose weight gradients may wait at once, with their
    activations. 0: as many as the schedule can use."""
    sequence_parallel: bool = False
    """Shard the activations between tensor-parallel layers (norms, dropout, residual stream) over the tokens."""
    distributed_timeout_minutes: Annotated[float, Bounds(0, 10_080, "that is a week", least_open=True)] = 10.0
    """A collective that waits longer ends the run."""


@dataclass(frozen=True)
class ZeroConfig:
    """ZeRO-DP: sharding over the data-parallel ranks."""

    zero_stage: Literal[0, 1, 2, 3] = 1
    """States sharded over data-parallel ranks. 0: none; 1: optimizer states; 2: also gradients; 3: also parameters."""
    zero_shard_size: Annotated[int, Bounds(0, 10**6, "no job has as many ranks; 0 stands for all")] = 0
    """Shard within groups of this many data-parallel ranks, such as a node's; replicate over the groups. 0: all."""
    zero_reduce_every: Literal["micro-batch", "step"] = "micro-batch"
    """Stages 2, 3: reduce gradients at every micro-batch (least memory), or once a step (least traffic)."""
    zero_gather_every: Literal["use", "step"] = "use"
    """Stage 3: gather weights at every use (least memory), or once a step (least traffic)."""
    reduce_bucket_size: Annotated[int, Bounds(1, 2**40, "no model has a layer of as many elements")] = 40_000_000
    """Elements of a communication buffer; larger units are reduced in several."""
    overlap_comm: bool = True
    """Overlap ZeRO communication with computation. Results are bitwise identical."""
    poison_buffers: bool = False
    """Debug: fill released parameters' buffers and fresh gradients with NaN, so that a use of either is seen, and stop
    at whatever overlaps a buffer of a collective in flight."""


@dataclass(frozen=True)
class ActivationConfig:
    """ZeRO-R: activations that are kept for the backward pass, and where."""

    recompute: Literal["none", "selective", "full"] = "none"
    """full: keep only each block's input, and compute the block again in backward (a third more compute). selective:
    recompute only what is cheap and large: norms, GELU, attention weights where the backend would save them."""
    partition_activations: bool = False
    """Pa: shard kept block inputs over tensor-parallel ranks. Needs --recompute full and tp > 1."""
    checkpoint_in_cpu: bool = False
    """Keep blocks' inputs in host memory, copied behind the computation. Needs --recompute full."""
    contiguous_checkpointing: bool = False
    """MD: keep blocks' inputs and gradients in arenas allocated beforehand. Needs --recompute full."""
