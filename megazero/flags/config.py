"""All flags: a tree of frozen dataclasses. The engine's part is `StepConfig`.

Flags are flat and bear Megatron's and DeepSpeed's names. A preset is a TOML file of the same names under the flags.
Field docstrings are the help text. The values of a run are a `stack` of layers; `resolve` fills in derived ones.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from megazero.engine.options.model_options import ModelOptions
from megazero.engine.options.optimizers import BYTES as BYTES
from megazero.engine.options.option import (
    Bounds,
    Iterations,
    OnResume,
    Positive,
    Requires,
    RequiresAny,
    Role,
    Usual,
    Written,
)
from megazero.engine.options.schema import ActivationConfig as ActivationConfig
from megazero.engine.options.schema import DocumentOptions, StepConfig
from megazero.engine.options.schema import OptimizerConfig as OptimizerConfig
from megazero.engine.options.schema import ParallelConfig as ParallelConfig
from megazero.engine.options.schema import TrainingConfig as TrainingConfig
from megazero.engine.options.schema import ZeroConfig as ZeroConfig
from megazero.families import FAMILIES

MOST_MINUTES = 10**6
Minutes = Annotated[float, Bounds(0, MOST_MINUTES, "that is two years")]
PLANNED = RequiresAny((("plan", None), ("plan-search", None)))

if TYPE_CHECKING:
    ArchitectureName = str
else:
    ArchitectureName = Literal[tuple(FAMILIES)]  # --help lists the choices


@dataclass(frozen=True)
class ModelConfig(ModelOptions):
    """Architecture and sizes. docs/results/flags.md lists more flags, which families, presets and a config.json set."""

    architecture: Annotated[ArchitectureName, Role.ON_SCREEN] = "gpt2"
    """Family of the model: its layers, and its defaults of other flags. gpt2: learned positions, LayerNorm, tanh GELU,
    biases, tied embeddings. llama: rotary positions, RMSNorm, SwiGLU, grouped-query attention, no biases, untied
    embeddings. The others differ from these two in norms, activations, biases or defaults; gpt-neox is Pythia's, and
    parallel is gptj without its bias and defaults. docs/results/families.md has a table of them."""


@dataclass(frozen=True)
class DataConfig:
    """Corpora, tokenizer and reading."""

    data_path: Annotated[tuple[str, ...], Usual("data", 0), Role.STAGE, Role.LOCAL, Role.PATH, OnResume.DATA] = ()
    """A corpus: the PREFIX of PREFIX.bin and PREFIX.idx. Or several: PREFIX1 PREFIX2 ... blends them in proportion to
    their tokens, W1 PREFIX1 W2 PREFIX2 ... by weights."""
    data_args_path: Annotated[str, Role.STAGE, Role.LOCAL, OnResume.DATA] = ""
    """Text file with the words of --data-path, for many corpora. # starts a comment."""
    split: Annotated[str, OnResume.ORDER] = "969,30,1"
    """Shares of training, validation and test data."""
    split_by: Annotated[Literal["auto", "documents", "tokens"], OnResume.ORDER] = "auto"
    """Division of a corpus by --split: documents keeps documents whole, as Megatron-LM does; tokens may cut inside
    them. auto: documents, unless training, validation or test would get none."""
    packing: Annotated[Literal["split", "best-fit"], OnResume.PACKING] = "split"
    """Documents in samples: split cuts their stream at every sample. best-fit puts whole documents together, and cuts
    those alone that are longer than a sample; it implies --reset-attention-mask and --reset-position-ids."""
    tokenizer: Annotated[str, Usual("data", 1), Role.LOCAL, Role.PATH] = ""
    """File or folder of a tokenizer: tokenizer.json, vocab.json with merges.txt, a SentencePiece .model, or a tiktoken
    FILE with FILE.json. gpt2:DIR, sentencepiece:FILE and tiktoken:FILE name the kind, which is recognised without.
    llama2:FILE, megatron:FILE: Megatron-LM's Llama2Tokenizer and SentencePieceTokenizer. byte: one token per byte.
    Empty: the tokenizer of the corpus, which PREFIX.json names."""
    eod_mask_loss: Annotated[bool, OnResume.LOSS] = False
    """Exclude from the loss the first token after each end-of-document token."""
    reset_attention_mask: Annotated[bool, OnResume.BY_DOCUMENT] = False
    """Limit attention to the tokens of the same document."""
    reset_position_ids: Annotated[bool, OnResume.BY_DOCUMENT] = False
    """Restart positions at 0 after each end-of-document token."""
    mock_data: Annotated[bool, OnResume.DATA] = False
    """Train on made-up tokens instead of --data-path, to try a layout. Most tokens follow from the one before, so that
    the loss falls (docs/run.md). Needs --vocab-size or --tokenizer."""
    skip_samples: str = ""
    """A:B leaves out samples A to B - 1. To pass a loss spike, load an earlier checkpoint and skip the samples of the
    spike, by their consumed_samples in metrics.jsonl."""
    data_stages: Annotated[str, OnResume.NOTED] = ""
    """TOML file of stages: each [[stage]] has from-sample, the first sample from which it holds, and the flags that
    differ from the command's: the corpora, --seq-length, batch sizes, the learning rate and its decay. Needs --save. A
    corpus that stays continues where it was."""
    num_workers: Annotated[int, Bounds(0, 64, "one thread per rank is ahead of any step"), Role.LOCAL] = 1
    """Threads per rank that read batches ahead. 0: read in the training thread."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Loss of data that is not trained on, and scores of tasks: during training, or of a checkpoint alone."""

    eval_interval: Annotated[Iterations, Usual("evaluation", 0)] = 0
    """Iterations between evaluations. 0: never."""
    eval_iters: Annotated[int, Bounds(0, 10**6, "training would wait for days"), Usual("evaluation", 1)] = 10
    """Global batches of an evaluation, always the same ones. 0: the whole split."""
    eval_only: Annotated[bool, Role.KIND_OF_RUN, Requires("load")] = False
    """Evaluate the weights of --load on a split of the data (--eval-split), print loss and perplexity, and end. With
    --log-dir, metrics.jsonl gets a line."""
    eval_split: Annotated[Literal["train", "validation", "test"], Requires("eval-only")] = "validation"
    """--eval-only: the split to evaluate."""
    tasks: Annotated[tuple[str, ...], Role.LOCAL, Role.PATH, Written("FILE")] = ()
    """Files of tasks in JSON lines (docs/tasks.md): multiple choice, cloze, bits per byte of texts. They are scored
    every --task-interval and after the last iteration, or of the checkpoint with --eval-only. Needs a tokenizer."""
    task_interval: Annotated[Iterations, Requires("tasks")] = 0
    """Iterations between scores of --tasks. 0: the least number in which they take at most 2 % of the time."""
    task_limit: Annotated[int, Bounds(0, 10**9, "no task has as many items"), Requires("tasks")] = 0
    """Items of each task to score, the first ones of its file. 0: all."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving, stopping and resuming."""

    on_resume: ClassVar = OnResume.UNSAID

    save: Annotated[str, Usual("saving", 0), Role.PLACE, Role.PATH, Written("DIR")] = ""
    """Folder for checkpoints. The last iteration is always saved; if a disk is full, attempts continue for ten minutes.
    Empty: nothing is saved."""
    load: Annotated[str, Usual("saving", 1), Role.PLACE, Role.PATH, Written("DIR")] = ""
    """Folder of checkpoints, or one of its iter_NNNNNNN. In a folder, the newest whole checkpoint is loaded, and
    damaged ones are skipped with a warning. A folder that is missing, or has nothing to load, is an error, unless it
    is the folder of --save: then the run starts from the beginning."""
    finetune: Annotated[bool, Role.KIND_OF_RUN, Requires("load")] = False
    """Load only weights. Optimizer, schedule and data start from the beginning, at iteration 0."""
    decay_from: Annotated[str, Requires("save"), Requires("decay-iters"), Written("S/iter_N")] = ""
    """S/iter_N: branch off a run with a constant learning rate. Load this checkpoint, with optimizer states and the
    place in the data, and decay to --min-lr in --decay-iters iterations, in the shape of --lr-wsd-decay-style. Needs a
    --save of its own, from which the same command resumes. Sets --train-iters and the other flags of the schedule."""
    decay_iters: Annotated[Iterations, Requires("decay-from"), Written("K")] = 0
    """Iterations of the decay of --decay-from."""
    load_exact: bool = False
    """End with an error if the newest checkpoint is damaged, instead of loading an older one."""
    save_interval: Annotated[Iterations, Requires("save")] = 0
    """Iterations between checkpoints. 0: save by time (--save-interval-minutes), and at the end."""
    save_interval_minutes: Minutes = 30.0
    """Minutes between checkpoints if --save-interval is not given. 0: save only at the end."""
    keep_last: Annotated[Iterations, Requires("save"), Written("N")] = 0
    """Checkpoints of this run to keep; older ones are deleted after a save, except the newest one from before skipped
    iterations. 0: all. Checkpoints of other runs are never deleted."""
    keep_every: Annotated[Iterations, Requires("keep-last")] = 0
    """Also keep checkpoints whose iteration is a multiple of this. 0: none. Needs --keep-last."""
    async_save: bool = False
    """Write checkpoints in the background. Training stops only for a copy to host memory, which needs as much memory as
    a rank saves. A save that is due waits for the one before it."""
    memory_checkpoint_interval: Annotated[Iterations, Requires("save"), Written("N")] = 0
    """Iterations between checkpoints in the memory of the nodes, written in the background: each rank's part on its own
    node and on the next. Needs --save. A resume takes the newest that is whole, if it is newer than the disk's. The
    next one is skipped if the last is not done. 0: none."""
    memory_checkpoint_dir: Annotated[str, Role.PATH, Requires("memory-checkpoint-interval")] = ""
    """Folder in the memory of each node for --memory-checkpoint-interval. Empty: /dev/shm/megazero-UID."""
    save_hf: Annotated[str, Role.PATH, Requires("save"), Written("DIR")] = ""
    """Folder for exports, iter_NNNNNNN each, as transformers writes models: weights in --precision, config.json,
    generation_config.json and the tokenizer. The last iteration of --train-iters is always exported. Rank 0 writes them
    from checkpoints while training continues. Empty: none."""
    save_hf_interval: Annotated[Iterations, Requires("save-hf")] = 0
    """Iterations between exports to --save-hf. A checkpoint is saved for each. 0: export only at the end."""
    exit_interval: Iterations = 0
    """Save and stop when the iteration is a multiple of this. 0: never."""
    exit_duration_minutes: Minutes = 0.0
    """Save and stop after this many minutes; with --elastic, from the first start. 0: never."""
    exit_before_minutes: Minutes = 0.0
    """Save and stop this many minutes before the time limit of the SLURM job. 0: never."""


@dataclass(frozen=True)
class MonitorConfig:
    """Finding hangs, slow ranks and wrong results."""

    hang_timeout: Minutes = 0.0
    """End the run with exit code 124 if a rank makes no progress for this many minutes. Each rank prints its current
    operation and its stacks. Saving and loading do not count. A collective itself ends the run after
    --distributed-timeout-minutes: choose less. 0: never."""
    straggler_interval: Iterations = 100
    """Iterations between comparisons of the ranks' computing times. Slow ranks are named with their hosts. 0: never."""
    check_replicas_interval: Iterations = 0
    """Iterations between checks that all copies of a weight, a moment or a router's biases are equal bit for bit. A
    difference ends the run. 0: never."""


@dataclass(frozen=True)
class LogConfig:
    """Metrics and progress."""

    on_resume: ClassVar = OnResume.UNSAID

    log_dir: Annotated[str, Usual("logging", 0), Role.LOCAL, Role.PLACE, Role.PATH, Written("DIR")] = ""
    """Folder for metrics.jsonl, report.html, config.toml (the given flags) and plan.txt (memory, all options, the
    environment). Empty: none of them is written."""
    verbose: bool = False
    """Print at the start also the contents of plan.txt: memory by kind with its formulas, all options, the
    environment."""
    show_options: Annotated[bool, Role.KIND_OF_RUN] = False
    """Print each option that is no default, its value and its source (the preset, the command line, ...), and end.
    plan.txt has the same table for a run, with derived values."""
    report: bool = True
    """Keep report.html in --log-dir: curves, memory and options in one page. A process of the lowest priority rewrites
    it every 30 seconds or more while the run trains; the last one is written at the end."""
    log_interval: Annotated[Positive, Role.LOCAL] = 1
    """Iterations between progress lines; metrics.jsonl has every iteration."""
    stats_interval: Iterations = 0
    """Iterations between statistics per layer in metrics.jsonl, report.html and the loggers: gradient norm, update over
    weight, largest activation, largest attention logit. 0: never. Predicted bytes are those of a step with them."""
    sample_prompts: Annotated[str, Requires("sample-interval"), Written("FILE")] = ""
    """Text file with a prompt per line, for --sample-interval. Use few prompts: each token of an answer takes a forward
    pass. Needs --tokenizer."""
    sample_interval: Annotated[Iterations, Requires("sample-prompts"), Written("N")] = 0
    """Iterations between samples: the model continues each prompt of --sample-prompts by 64 tokens, with the same
    random numbers each time. They appear in metrics.jsonl, report.html and the loggers. 0: never."""
    profile_iterations: Annotated[str, Requires("log-dir")] = ""
    """A:B: write a trace of iterations A to B, on all ranks, to --log-dir/trace-A-B.json, for chrome://tracing or
    ui.perfetto.dev. Empty: none."""
    tensorboard_dir: Annotated[str, Role.LOCAL, Role.PLACE, Role.PATH] = ""
    """Folder for TensorBoard. Empty: none."""
    wandb_project: Annotated[str, Role.LOCAL, Requires("log-dir"), Written("PROJECT")] = ""
    """Weights & Biases project. Without an account, the run is written offline under --log-dir. A resume with the same
    --log-dir continues the same run. Empty: none."""
    wandb_name: Annotated[str, Role.LOCAL, Role.PLACE, Requires("wandb-project")] = ""
    """Name of the run in --wandb-project. Empty: the name of the --log-dir folder."""


@dataclass(frozen=True)
class PlanConfig:
    """Predictions for a cluster, made on any machine: no GPU, no data and no other ranks are needed.

    Example: python pretrain_gpt.py --plan --preset gpt2-1.5b --world-size 16 --device-type h100-80gb
    """

    plan: Annotated[bool, Usual("predictions", 0), Role.KIND_OF_RUN, Requires("device-type")] = False
    """Predict the memory, traffic and step time of this run on --world-size devices, print them, write plan.json and,
    with matplotlib, plan.png to --log-dir, and end."""
    plan_search: Annotated[
        bool, Usual("predictions", 1), Role.KIND_OF_RUN, Requires("device-type"), Requires("world-size")
    ] = False
    """Search the fastest layouts of this model and --global-batch-size that fit on --world-size devices, print them as
    command lines, and end. Layout flags of the command line are kept; those of a preset are not."""
    world_size: Annotated[
        int, Bounds(0, 10**6, "no job has as many ranks"), Usual("predictions", 2), Written("N"), PLANNED
    ] = 0
    """--plan, --plan-search: number of devices, one rank each. 0: --plan assumes one."""
    device_type: Annotated[
        str,
        Usual("predictions", 3),
        Role.PATH,
        Written("NAME, such as h100-80gb"),
        RequiresAny((*PLANNED.ways, ("layout", "auto"))),
    ] = ""
    """--plan, --plan-search: a device of scripts/devices, such as h100-80gb or cpu, or a TOML file like those.
    scripts/measure_device.py writes one for the CPU on which it runs. --layout auto: instead of the file of this
    run's GPU, or of cpu."""
    mtbf: Annotated[float, Bounds(0, 1e9, "no device lasts as long"), Usual("predictions", 4), Requires("plan")] = 0.0
    """--plan: mean hours between failures of one device; also print how often to save, and the share of time that
    failures leave. Llama 3's 16,384 H100 failed 419 times in 54 days: 50,700 hours of a device. 0: print neither."""
    moe_plan_imbalance: Annotated[float, Bounds(1, 1e3, "few runs have as many ranks of experts"), PLANNED] = 1.0
    """--plan, --plan-search: rows of tokens that the busiest rank of --expert-model-parallel-size receives, over the
    mean of these ranks. The plan is that of this rank, whose experts get equally many tokens."""
    rehearse: str = ""
    """WORLD[:RANKS]: instead of training, run two steps of one rank of WORLD without the other ranks, and report its
    bytes by kind, every collective and its part of a checkpoint, next to the estimate. Needs no data and no GPU. RANKS:
    one rank, several such as 0,399, or stages for one per pipeline stage. Default: rank 0."""
    rehearse_on: Literal["gpu", "cpu", "here"] = "gpu"
    """--rehearse: gpu or cpu imitates the kernels and collectives of that device on tensors without data; here uses
    real tensors on the device of this machine."""


@dataclass(frozen=True)
class Config(StepConfig):
    """Pretrain a GPT model. Run it alone, under torchrun or under srun: the flags are the same.

    Example: python pretrain_gpt.py --preset tiny --data-path PREFIX --tokenizer byte --save runs/a --log-dir runs/a
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    log: LogConfig = field(default_factory=LogConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    preset: Annotated[str, Usual("model", 0)] = ""
    """TOML file of flags (without the dashes), or the name of one in scripts/presets. Flags override it; its warm-up,
    decay and saving give way to them."""
    hf_config: Annotated[str, Usual("model", 1)] = ""
    """config.json of a Hugging Face model, or a folder with one: the model to train. Flags override it: --num-layers 2
    makes a small copy, --seq-length shortens the samples. The folder's tokenizer is the default of --tokenizer. Options
    that this version does not compute are refused by key and value. Reading it takes about two seconds, in which
    transformers is imported. A resumed run has the model of its checkpoint instead. A Hugging Face folder as --load
    implies it."""

    @property
    def trains(self) -> bool:
        return not self.evaluation.eval_only

    @property
    def documents(self) -> DocumentOptions:
        return DocumentOptions(self.data.reset_attention_mask, self.data.reset_position_ids)
