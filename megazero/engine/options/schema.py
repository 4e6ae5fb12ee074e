"""`StepConfig`: the options of a step, as one frozen dataclass tree. Field docstrings are the help text of flags."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple

from megazero.engine.options.batch_sizes import micro_batches
from megazero.engine.options.model_options import ModelOptions
from megazero.engine.options.optimizers import BYTES, OPTIMIZERS, Optimizer
from megazero.engine.options.option import (
    Bounds,
    DecayRate,
    Iterations,
    LearningRate,
    LossScaleValue,
    OnGpu,
    OnResume,
    Positive,
    Ranks,
    Requires,
    Role,
    Usual,
    Written,
)
from megazero.engine.plan.schedule.schedules import EVALUATION, SCHEDULES

# Bytes of a chunk of logits, and its fewest tokens: each chunk reads and writes the gradient of the whole table once,
# which takes a fifth of the time of 128 tokens on a CPU (benchmarks/head.py).
CPU_LOGITS, GPU_LOGITS, LEAST_CHUNK = 1 << 25, 1 << 29, 512

Precision = Literal["fp32", "bf16", "fp16", "fp64"]

# Warm-up of a GPU's runs: a hundredth of the iterations, at most 2000.
WARMUP_SHARE, MOST_WARMUP = 100, 2000


def _fastest(options: StepConfig, precision: str) -> str:
    """Return the precision in which a GPU multiplies fastest, unless gradients have another one."""
    return precision if options.training.grad_dtype in ("fp32", precision) else "fp32"


def _warmup(options: StepConfig, precision: str) -> int:
    return min(MOST_WARMUP, options.decay_end // WARMUP_SHARE) if options.trains else 0


FASTEST = OnGpu("bf16, or fp16 if they lack bf16", _fastest)
WARMUP = OnGpu("1 % of the iterations, at most 2000", _warmup)

if TYPE_CHECKING:
    ScheduleName = str
else:
    ScheduleName = Literal[tuple(SCHEDULES)]  # --help lists the choices


@dataclass(frozen=True)
class TrainingConfig:
    """Duration, batches and precision."""

    micro_batch_size: Annotated[
        int,
        Bounds(1, 2**20, "a rank computes all of its samples at once"),
        Usual("batch", 0),
        Role.LAYOUT,
        Role.STAGE,
        Role.ON_SCREEN,
    ] = 1
    """Samples that a rank computes at once."""
    global_batch_size: Annotated[
        int,
        Bounds(0, 2**30, "published batches are thousands of samples"),
        Usual("batch", 1),
        Role.RECIPE,
        Role.STAGE,
        Role.ON_SCREEN,
        Written("B"),
        OnResume.BATCHES,
    ] = 0
    """Samples of an iteration, over all ranks. 0, the default: --micro-batch-size x data-parallel ranks. If the ranks
    cannot share them equally, some ranks compute padding, which has no effect on the results."""
    rampup_batch_size: Annotated[tuple[int, ...], Role.RECIPE, OnResume.BATCHES] = ()
    """START INCREMENT SAMPLES: start with a global batch of START samples. Add INCREMENT to it at equal intervals, so
    that it reaches --global-batch-size after SAMPLES samples of training."""
    train_iters: Annotated[Positive, Usual("batch", 2), Role.RECIPE, Role.ON_SCREEN] = 1000
    """Iterations to train in total. A resumed run continues the count."""
    train_tokens: Annotated[int, Bounds(0, 10**17, "no corpus has as many"), Usual("batch", 3), Role.RECIPE] = 0
    """Instead of --train-iters: tokens to train on in total, rounded up to whole iterations. 0: --train-iters."""
    recipe: Annotated[Literal["none", "auto"], Usual("learning rate", 0)] = "none"
    """auto: choose the global batch, the learning rate and its schedule, weight decay, AdamW's decay rates and the
    length of the run (20 tokens a parameter, unless --train-tokens is given) from the model's size by published laws,
    docs/recipes.md. The start prints each value with its source, and config.toml has them. Flags of the command line
    keep their values; those of a preset do not count. For adamw and muon."""
    seed: Annotated[int, Bounds(-(2**63), 2**63 - 1, "seeds are 64-bit"), OnResume.ORDER] = 1234
    """Seed of initial weights, data order and dropout. The same seed gives the same run in every layout."""
    precision: Annotated[Precision, FASTEST, Usual("batch", 4), Role.ON_SCREEN, OnResume.ROUNDING] = "fp32"
    """Precision of weights and activations. Master weights and moments are fp32. fp16 scales the loss. fp64 is for
    tests: weights, gradients, moments and checkpoints are all fp64."""
    grad_dtype: Annotated[Precision, OnResume.ROUNDING] = "fp32"
    """Precision in which gradients are accumulated and reduced. It is always fp64 with --precision fp64."""
    freeze_parameters: Annotated[tuple[str, ...], OnResume.UPDATES] = ()
    """Patterns of parameter names that are not trained, such as token_embedding.* or blocks.[01].*"""
    initial_loss_scale: LossScaleValue = 65536.0
    """fp16: initial factor of the loss, which is scaled against underflow of gradients."""
    min_loss_scale: LossScaleValue = 1.0
    """fp16: smallest scale. An overflow at this scale ends the run, after a checkpoint is saved."""
    loss_scale_window: Positive = 1000
    """fp16: iterations without an overflow before the scale doubles."""
    hysteresis: Positive = 2
    """fp16: overflows, with fewer than --loss-scale-window iterations between them, before the scale halves."""
    max_skipped_iterations: Iterations = 50
    """End the run with an error after this many iterations in a row without an update. 0: never."""
    matmul_backend: Literal["auto", "torch", "onednn"] = "auto"
    """Library of fp32 matrix products on a CPU: torch's (MKL) or oneDNN. auto: the faster one, measured at the start.
    The two differ in the last bits. To resume bit for bit on another machine, give the library that plan.txt of the
    first run names."""
    tf32: bool = True
    """Compute fp32 matrix products on a GPU in TensorFloat-32, which is several times faster and has 10 bits of
    mantissa instead of 23. No effect in other precisions or on a CPU."""
    deterministic_mode: bool = False
    """GPU: use deterministic algorithms of torch, cuBLAS and NCCL, so that a run in the same layout on the same GPUs
    repeats bit for bit. Attention is slower: its fastest kernels (cuDNN's) add in any order. Not yet run on a GPU. On a
    CPU, runs with the same --matmul-backend are always repeated bit for bit."""
    compile: bool = False
    """Compile element-wise operations with torch.compile: GELU and SwiGLU, unless --fused-kernels is triton, and the
    softmax of attention if torch has no fused attention for it (with dropout, in bf16 on a CPU, in fp64 on a GPU). The
    start takes longer, unless the model has none of these."""
    fused_kernels: Literal["auto", "triton", "eager"] = "auto"
    """GPU: triton computes norms, GELU, SwiGLU, rotary positions, dropout with the residual sum, and the loss by fused
    kernels; eager computes them by torch's operators. auto: triton where it works, except in fp64. Dropout masks are
    the same bit for bit."""

    def kernels_on(self, device_type: str) -> str:
        """Return the kernels of a device, triton or eager. Any device but a CPU is, or stands for, a GPU."""
        if self.fused_kernels != "auto":
            return self.fused_kernels
        return "eager" if device_type == "cpu" or self.precision == "fp64" else "triton"

    @property
    def product_precision(self) -> Precision:
        """Precision of matrix products in an update: fp16 has too few exponents."""
        return "fp32" if self.precision == "fp16" else self.precision


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its learning rate; biases and norms do not decay."""

    on_resume: ClassVar = OnResume.UPDATES

    optimizer: Annotated[Literal["adamw", "lion", "muon"], OnResume.STATES] = "adamw"
    """adamw: two moments per weight. lion: one, and steps of equal size: take a third to a tenth of AdamW's --lr, and
    so much more --weight-decay. muon: the matrices of blocks move along their orthogonalized momentum, their only
    state; tables, head, norms, biases and routers take AdamW, with the same --lr."""
    muon_momentum: Annotated[DecayRate, Requires("optimizer", "muon")] = 0.95
    """--optimizer muon: decay rate of the momentum (Nesterov's)."""
    muon_scale: Annotated[Literal["moonlight", "keller"], Requires("optimizer", "muon")] = "moonlight"
    """--optimizer muon: factor of --lr for an m x n matrix. moonlight: 0.2 sqrt(max(m, n)): updates are as
    large as AdamW's, so its --lr and --weight-decay carry over. keller: sqrt(max(1, m / n)), with an --lr of its own,
    such as 0.02."""
    muon_num_ns_steps: Annotated[
        int, Bounds(1, 100, "5 are usual, and 10 are nearly exact"), Requires("optimizer", "muon")
    ] = 5
    """--optimizer muon: Newton-Schulz iterations of an update."""
    adam_moments: Annotated[Literal["fp32", "bf16", "int8"], OnResume.ROUNDING] = "fp32"
    """Precision of the moments, which are rounded at random: AdamW's two, and the one of Lion and Muon. bf16: 2 bytes
    each. int8: 1 byte, and one for the common exponent of 32 neighbours in a row. Moments of vectors, and of weights
    whose last dimension is no multiple of 32, stay fp32. In checkpoints all are fp32, so a run may resume with
    another."""
    master_weights: Annotated[Literal["fp32", "split"], OnResume.ROUNDING] = "fp32"
    """--precision bf16: form of the fp32 weights that are updated. fp32: 4 bytes. split: the 2 bytes that the bf16
    weights lack. The values are the same, but weights in the middle between two bf16 numbers are rounded away from 0
    rather than to the even one."""
    lr: Annotated[LearningRate, Usual("learning rate", 1), Role.RECIPE, Role.STAGE, OnResume.RATE] = 3e-4
    """Peak learning rate."""
    min_lr: Annotated[LearningRate, Role.RECIPE, Role.STAGE, OnResume.RATE] = 0.0
    """Learning rate at the end of the decay."""
    lr_warmup_iters: Annotated[Iterations, WARMUP, Usual("learning rate", 2), Role.RECIPE, OnResume.RATE] = 0
    """Iterations of linear warm-up."""
    lr_decay_iters: Annotated[Iterations, Role.RECIPE, Role.STAGE, OnResume.RATE] = 0
    """Iteration at which the learning rate reaches --min-lr. 0: --train-iters."""
    lr_decay_style: Annotated[
        Literal["constant", "linear", "cosine", "inverse-square-root", "wsd"],
        Usual("learning rate", 3),
        Role.RECIPE,
        Role.STAGE,
        OnResume.RATE,
    ] = "constant"
    """Shape of the decay after warm-up. inverse-square-root: --lr x sqrt(--lr-warmup-iters / iteration), at least
    --min-lr. wsd: constant (stable), then a decay to --min-lr in the last --lr-wsd-decay-iters."""
    lr_wsd_decay_iters: Annotated[Iterations, Role.RECIPE, Role.STAGE, OnResume.RATE] = 0
    """--lr-decay-style wsd: iterations of the decay at the end. A tenth of the run is usual."""
    lr_wsd_decay_style: Annotated[
        Literal["exponential", "linear", "cosine", "minus_sqrt"], Role.STAGE, OnResume.RATE
    ] = "exponential"
    """--lr-decay-style wsd: factor of the decay, where d grows from 0 to 1. exponential: 2 x 0.5^d - 1; linear: 1 - d;
    cosine: (1 + cos(pi d)) / 2; minus_sqrt: 1 - sqrt(d)."""
    weight_decay: Annotated[float, Bounds(0, 1000, "usual values are between 0 and 1"), Role.RECIPE] = 0.01
    """Decoupled weight decay of matrices."""
    adam_beta1: Annotated[DecayRate, Role.RECIPE] = 0.9
    """Decay rate of the first moment."""
    adam_beta2: Annotated[DecayRate, Role.RECIPE] = 0.999
    """Decay rate of the second moment."""
    adam_eps: Annotated[float, Bounds(0, 1, "it only keeps the update's divisor from 0", least_open=True)] = 1e-8
    """Added to the root of the second moment."""
    clip_grad: Annotated[float, Bounds(0, 1e9, "no gradient norm is as large; 0 turns clipping off")] = 1.0
    """Largest global L2 norm of the gradients; larger gradients are scaled down to it. 0: no clipping."""
    ema_interval: Annotated[Iterations, Written("N"), OnResume.NOTED] = 0
    """Keep a running average of the weights, which changes in every N-th update. It is sharded and saved like an
    optimizer state, as wide as the master weights. Evaluations also give its loss (validation_loss_ema), and
    scripts/checkpoint.py export --weights ema writes it. 0: no average."""
    ema_decay: Annotated[DecayRate, Requires("ema-interval"), OnResume.NOTED] = 0.999
    """--ema-interval: weight of the old average in the new one. The first averages are plain means: the k-th change has
    the weight 1 - 1/k, if that is less."""

    optimizer_cpu_offload: Annotated[bool, OnResume.NOTED] = False
    """Keep master weights, optimizer states and reduced gradients in host memory, and update them there: the device
    keeps its weights. Gradients are copied during the backward, weights after the update. The same run; on CPUs, bit
    for bit."""
    optimizer_offload_fraction: Annotated[
        float,
        Bounds(0, 1, "1 keeps the states of all units in host memory", least_open=True),
        Requires("optimizer-cpu-offload"),
        OnResume.NOTED,
    ] = 1.0
    """--optimizer-cpu-offload: share of a rank's elements with their states in host memory. Its first layers have them
    there; a layer is not divided."""
    optimizer_nvme_offload: Annotated[str, Requires("optimizer-cpu-offload"), OnResume.NOTED] = ""
    """--optimizer-cpu-offload: a folder on a fast disk of each node. States and gradients are kept in a file there, and
    host memory holds those of two layers at a time, for the update. The same run, at the speed of the disk."""

    @property
    def rules(self) -> Optimizer:
        forms = OPTIMIZERS[self.optimizer]._replace(moments=self.adam_moments, master_weights=self.master_weights)
        return forms.averaged(self.ema_interval)


@dataclass(frozen=True)
class ParallelConfig:
    """Division of the model over ranks. Data-parallel ranks = all ranks / (tensor x context x pipeline)."""

    layout: Annotated[Literal["given", "auto"], Usual("parallelism", 0)] = "given"
    """auto: choose the flags of the layout for the ranks and devices of this run: the fastest layout that fits in
    memory, as predicted by --plan-search. It chooses parallelism, schedule, ZeRO stage, recompute and micro-batch size,
    prints them as flags, and writes them to config.toml. Flags among these on the command line keep their value;
    those of a preset do not count, unless the preset has layout = "auto". Needs --global-batch-size. given: take these
    flags as they are given, or their defaults. Every layout trains the same model."""
    elastic: Annotated[str, Role.KIND_OF_RUN, Requires("save"), Requires("global-batch-size")] = ""
    """MIN:MAX, such as 6:8: train on as many nodes as there are, from MIN to MAX. When nodes are lost, the run starts
    again on those that are left, from its newest checkpoint; returning nodes join after the current step. Batch
    and samples stay the same, and so does the loss. Needs --save and --global-batch-size. Implies --layout auto, and
    --load of the --save folder when it has a checkpoint. SAVE/layouts.json keeps the layout for each number of nodes.
    Start every node with scripts/launch.sh, or the job with scripts/slurm/pretrain.sbatch (docs/cluster.md)."""
    tensor_model_parallel_size: Annotated[Ranks, Usual("parallelism", 1), Role.LAYOUT, Role.ON_SCREEN] = 1
    """Ranks that share each matrix of a layer."""
    context_parallel_size: Annotated[Ranks, Role.LAYOUT, Role.ON_SCREEN] = 1
    """Ranks that share the tokens of each sample, for sequences whose activations do not fit one device. Any length and
    any documents: ranks have equally many tokens, up to one, and nearly equal work in attention."""
    cp_exchange: Literal["auto", "all-gather", "ring"] = "auto"
    """Exchange of keys and values between context-parallel ranks. all-gather: all of a layer's at once, before its
    attention. ring: those of one rank at a time, during attention to those before; it holds less. auto: the ring
    where its messages should take less time than the computation that hides them."""
    pipeline_model_parallel_size: Annotated[Ranks, Usual("parallelism", 2), Role.LAYOUT, Role.ON_SCREEN] = 1
    """Pipeline stages, which share the layers."""
    expert_model_parallel_size: Annotated[Ranks, Role.LAYOUT] = 1
    """Ranks that the experts of a layer are divided over. Tokens are sent to them and back. These are neighbours among
    all ranks of a pipeline stage, so there may be more of them than data-parallel ranks. With tensor parallelism, only
    together with --sequence-parallel."""
    expert_tensor_parallel_size: Annotated[int, Bounds(0, 10**6, "no job has as many ranks"), Role.LAYOUT] = 0
    """Ranks that share the inner width of each expert; it must divide --tensor-model-parallel-size. 0: as many."""
    pipeline_schedule: Annotated[ScheduleName, Role.LAYOUT] = "1f1b"
    """Order of forwards and backwards. gpipe keeps the activations of all micro-batches; 1f1b of as many as there are
    stages. interleaved divides the idle time of 1f1b by the virtual stages per rank, and sends more messages.
    zero-bubble (ZB-H1) has a third of the idle time of 1f1b, because it computes weight gradients while 1f1b waits.
    zero-bubble-v (ZB-V) has a sixth, with two virtual stages per rank."""
    virtual_pipeline_stages: Annotated[int, Bounds(1, 4096, "each holds at least one layer"), Role.LAYOUT] = 1
    """Chunks of layers per pipeline rank, for --pipeline-schedule interleaved, or zero-bubble-v, which needs 2."""
    pipeline_split: Annotated[str, Role.LAYOUT] = ""
    """Layers of each virtual pipeline stage, in the order of the forward, such as 4,4,3,1. Empty: a split that balances
    the computation, including that of the output head."""
    zero_bubble_backlog: Annotated[int, Bounds(0, 10**6, "no rank has as many micro-batches")] = 0
    """--pipeline-schedule zero-bubble or zero-bubble-v: largest number of micro-batches whose weight gradients are
    postponed at a time. A smaller number saves memory and costs time. 0: as many as the schedule can use."""
    sequence_parallel: Annotated[bool, Role.LAYOUT] = False
    """Shard the activations between tensor-parallel layers (norms, dropout, residual stream) over the tokens."""
    distributed_timeout_minutes: Annotated[float, Bounds(0, 10_080, "that is a week", least_open=True)] = 10.0
    """End the run if a collective takes longer than this."""


@dataclass(frozen=True)
class ZeroConfig:
    """ZeRO-DP: sharding over the data-parallel ranks."""

    zero_stage: Annotated[Literal[0, 1, 2, 3], Usual("parallelism", 3), Role.LAYOUT, Role.ON_SCREEN] = 1
    """States that are sharded over data-parallel x context-parallel ranks. 0: none; 1: optimizer states; 2: also
    gradients; 3: also parameters."""
    zero_shard_size: Annotated[int, Bounds(0, 10**6, "no job has as many ranks; 0 stands for all"), Role.LAYOUT] = 0
    """Shard within groups of this many data-parallel ranks, such as those of a node, and replicate over the groups. 0:
    all ranks are one group."""
    zero_reduce_every: Literal["micro-batch", "step"] = "micro-batch"
    """Stages 2 and 3: reduce gradients after every micro-batch (least memory), or once a step (least traffic)."""
    zero_gather_every: Literal["use", "step"] = "use"
    """Stage 3: gather weights at every use (least memory), or once a step (least traffic)."""
    reduce_bucket_size: Annotated[int, Bounds(1, 2**40, "no model has a layer of as many elements")] = 40_000_000
    """Elements of a communication buffer for gradients. A larger block or embedding is reduced in several parts."""
    overlap_comm: bool = True
    """Overlap ZeRO communication with computation. Sums have the same order, and results the same bits."""
    poison_buffers: bool = False
    """Debugging: fill released parameters and fresh gradients with NaN, so that reading them shows in the loss; and
    stop if an operation uses a buffer of a collective that is in flight."""


@dataclass(frozen=True)
class ActivationConfig:
    """ZeRO-R: activations that are kept for the backward pass, and where."""

    recompute: Annotated[Literal["none", "selective", "full"], Role.LAYOUT] = "none"
    """full: keep only the input of each block, and compute the block again in backward, for about 2/9 more compute.
    selective: recompute only large, cheap activations: norms, GELU, and attention weights if they would be saved."""
    partition_activations: Annotated[bool, Role.LAYOUT, Requires("recompute", "full")] = False
    """Shard kept block inputs over tensor-parallel ranks (Pa of the ZeRO paper). Needs --recompute full."""
    checkpoint_in_cpu: Annotated[bool, Role.LAYOUT, Requires("recompute", "full")] = False
    """Keep block inputs in host memory, copied while the GPU computes (Pa+cpu). Needs --recompute full."""
    contiguous_checkpointing: Annotated[bool, Role.LAYOUT, Requires("recompute", "full")] = False
    """Keep block inputs and gradients in arenas that are allocated at the start, against fragmentation (MD). Needs
    --recompute full."""
    loss_chunk_tokens: Annotated[int, Bounds(-1, 10**9, "no sample is as long")] = -1
    """Tokens of a micro-batch whose logits are in memory together: loss and gradients are computed chunk by chunk. 0:
    all tokens. -1: as many as make 32 MB of logits on a CPU, 512 MB on a GPU, but at least 512; all, if gradients are
    in 16 bit, because sums of chunks would be rounded."""


class DocumentOptions(NamedTuple):
    """Effects of the documents in a sample: attention is limited to the tokens of one; positions restart with each."""

    reset_attention_mask: Annotated[bool, OnResume.BY_DOCUMENT] = False
    reset_position_ids: Annotated[bool, OnResume.BY_DOCUMENT] = False


@dataclass(frozen=True)
class StepConfig:
    """The options of a training step. `flags.config.Config` adds those of a run."""

    model: ModelOptions = field(default_factory=ModelOptions)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: Annotated[OptimizerConfig, OnResume.STATES] = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    activations: ActivationConfig = field(default_factory=ActivationConfig)

    @property
    def trains(self) -> bool:
        """True; a run that evaluates alone overrides it: it has no gradients and no moments."""
        return True

    @property
    def documents(self) -> DocumentOptions:
        """None; a run overrides it."""
        return DocumentOptions()

    @property
    def decay_end(self) -> int:
        """Iteration at which the learning rate has decayed."""
        return self.optimizer.lr_decay_iters or self.training.train_iters

    @property
    def schedule(self) -> str:
        """Schedule of the run's own program, for `plan.program`: --pipeline-schedule, or forward passes alone."""
        return self.parallel.pipeline_schedule if self.trains else EVALUATION

    @property
    def copies_kept_inputs(self) -> bool:
        """True if inputs that are kept in slots are copied for recompute: queued weight gradients outlive the slots."""
        activations = self.activations
        slots = activations.checkpoint_in_cpu or activations.contiguous_checkpointing
        return slots and SCHEDULES[self.parallel.pipeline_schedule].backlog and not activations.partition_activations

    def loss_chunk(self, device_type: str, tp: int) -> int:
        """Return the tokens whose logits a rank holds together; 0: all of a micro-batch."""
        asked, training = self.activations.loss_chunk_tokens, self.training
        if asked >= 0:
            return asked
        if BYTES[training.grad_dtype] == 2:
            return 0
        width = -(-self.model.vocab_size // tp) * BYTES[training.precision]
        return max(LEAST_CHUNK, (CPU_LOGITS if device_type == "cpu" else GPU_LOGITS) // width)

    def micro_batches(self, dp: int) -> int:
        """Micro-batches of an iteration of the full global batch on each rank."""
        return micro_batches(self.training.global_batch_size, self.training.micro_batch_size, dp)
