"""Flags of a run around its steps: data, evaluation, checkpoints, monitoring, logs, plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megazero.config.limits import Bounds, Iterations, Minutes, Positive, is_number

# A blend of more corpora has no entry per corpus in the metrics, whose lines would be pages.
MAX_NAMED_CORPORA = 100


@dataclass(frozen=True)
class DataConfig:
    """Corpora, tokenizer and reading."""

    data_path: tuple[str, ...] = ()
    """PREFIX of a .bin/.idx pair; PREFIX1 PREFIX2 ... to blend corpora in proportion to their tokens, or W1 PREFIX1 W2
    PREFIX2 ... by weights."""
    data_args_path: str = ""
    """Text file of what --data-path would name, for many corpora. # begins a comment."""
    split: str = "969,30,1"
    """Shares of the documents for training, validation and test. See --split-by."""
    split_by: Literal["auto", "documents", "tokens"] = "auto"
    """--split between whole documents, as Megatron does, or at tokens, inside documents. auto: by documents, unless
    there are so few that training, validation or test would get none: a single text file is one document."""
    tokenizer: str = ""
    """A file or its folder, recognised: tokenizer.json, vocab.json with merges.txt, a SentencePiece .model, a tiktoken
    FILE with FILE.json; or with the kind named: gpt2:DIR, sentencepiece:FILE, tiktoken:FILE; or byte. Empty: the one
    that made the corpus, which PREFIX.json remembers."""
    eod_mask_loss: bool = False
    """Exclude from the loss the token after each end-of-document token: the first token of another document."""
    reset_attention_mask: bool = False
    """Bound attention by documents: no token attends to one of another document. A document's last token is its
    end-of-document token."""
    reset_position_ids: bool = False
    """Restart positions at 0 behind each end-of-document token."""
    mock_data: bool = False
    """Train on made-up tokens instead of --data-path, to try a layout; needs --vocab-size or --tokenizer. All splits
    are endless, and there is nothing to learn."""
    skip_samples: str = ""
    """A:B leaves out samples A to B - 1 of the run, counted as metrics.jsonl's consumed_samples are: go back to a
    checkpoint from before a loss spike, and on without the data that made it."""
    num_workers: Annotated[int, Bounds(0, 64, "one process per rank is ahead of any step")] = 1
    """Processes per rank that read batches ahead, behind the step that runs. 0: read in the training process."""

    @property
    def named_corpora(self) -> int:
        """Corpora of --data-path that the metrics tell apart; 1: it names one, or more than they do."""
        words = self.data_path
        num_corpora = len(words) // 2 if words and is_number(words[0]) else len(words)  # with weights, or without
        return num_corpora if 1 < num_corpora <= MAX_NAMED_CORPORA else 1

    @property
    def document_flags(self) -> tuple[str, ...]:
        """The flags given that need the end-of-document token."""
        flags = {
            "--eod-mask-loss": self.eod_mask_loss,
            "--reset-attention-mask": self.reset_attention_mask,
            "--reset-position-ids": self.reset_position_ids,
        }
        return tuple(flag for flag, given in flags.items() if given)


@dataclass(frozen=True)
class EvaluationConfig:
    """Loss of data that is not trained on: during training, or of a checkpoint alone."""

    eval_interval: Iterations = 0
    """Iterations between evaluations. 0: never."""
    eval_iters: Annotated[int, Bounds(0, 10**6, "training would wait for days")] = 10
    """Global batches of an evaluation, always the same ones. 0: the whole split, each of its tokens a target once."""
    eval_only: bool = False
    """Evaluate the weights of --load on a split, print loss and perplexity, and end: nothing is trained or saved. The
    metrics.jsonl under --log-dir gets a line; name another folder than that of a run which still writes."""
    eval_split: Literal["train", "validation", "test"] = "validation"
    """--eval-only: the split of --data-path to evaluate."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving, stopping and resuming."""

    save: str = ""
    """Folder for checkpoints; the last iteration is always saved. Empty: none."""
    load: str = ""
    """Folder of checkpoints, or one of its iter_NNNNNNN. A folder without a checkpoint starts fresh; so does one that
    is not there, if it is --save too or with --load-or-start. In a folder, a damaged checkpoint is passed over, with a
    warning, for the newest whole one before it."""
    finetune: bool = False
    """Load weights only: optimizer, schedule and data begin anew, at iteration 0."""
    load_exact: bool = False
    """Refuse a damaged checkpoint instead of going on from an older one."""
    save_interval: Iterations = 0
    """Iterations between checkpoints. 0: by time alone (--save-interval-minutes), and at the end."""
    save_interval_minutes: Minutes = 30.0
    """Minutes between checkpoints, with --save and without --save-interval. 0: only at the end."""
    keep_last: Iterations = 0
    """Whole checkpoints of this run to keep; older ones are deleted after a save. 0: all. Those of other runs stay, and
    the newest from before skipped iterations."""
    keep_every: Iterations = 0
    """Keep checkpoints whose iteration is a multiple of this, besides those of --keep-last. 0: none."""
    async_save: bool = False
    """Write checkpoints in the background: training stops only for a copy to host memory, which is as large as what a
    rank saves. See --on-save-busy."""
    exit_interval: Iterations = 0
    """Save and stop when the iteration is a multiple of this. 0: never."""
    exit_duration_minutes: Minutes = 0.0
    """Save and stop after this many minutes. 0: never."""
    exit_before_minutes: Minutes = 0.0
    """Save and stop this many minutes before the time limit of the SLURM job. 0: never."""


@dataclass(frozen=True)
class MonitorConfig:
    """Finding hangs, slow ranks and wrong results."""

    hang_timeout: Minutes = 0.0
    """End the run, with exit code 124, when a rank has made no progress for this many minutes: each says in which
    operation it is, and prints its stacks. Saving and loading, which have limits of their own, do not count. Choose
    less than --distributed-timeout-minutes. 0: never."""
    straggler_interval: Iterations = 100
    """Iterations between comparisons of the ranks' own computing times; slow ranks are named, with their hosts. 0:
    never."""
    check_replicas_interval: Iterations = 0
    """Iterations between checks that all copies of a weight or a moment are equal bit for bit: over data-parallel
    ranks, of what tensor parallelism replicates, and of the tied table. A copy that differs ends the run. 0: never."""


@dataclass(frozen=True)
class LogConfig:
    """Metrics and progress."""

    log_dir: str = ""
    """Folder for metrics.jsonl, config.toml and plan.txt. Empty: none of them is written."""
    verbose: bool = False
    """Print at the start what plan.txt has, too: memory by kind with its formulas, all options, the environment."""
    log_interval: Positive = 1
    """Iterations between progress lines; metrics.jsonl has every iteration."""
    sample_prompts: str = ""
    """Text file with a prompt per line, for --sample-interval. Few: every token takes a forward pass over whole
    samples. Needs --tokenizer."""
    sample_interval: Iterations = 0
    """Iterations between continuations of --sample-prompts by the model being trained, 64 tokens each, always with the
    same random numbers: in metrics.jsonl, report.html, and the loggers that are on. 0: never."""
    profile_iterations: str = ""
    """A:B: trace iterations A to B of this run, both included, into --log-dir/trace-A-B.json, one file of all ranks for
    chrome://tracing and ui.perfetto.dev. Empty: none."""
    tensorboard_dir: str = ""
    """Folder for TensorBoard. Empty: none."""
    wandb_project: str = ""
    """Weights & Biases project; offline, under --log-dir, without an account. A resume in the same --log-dir goes on in
    the same run there. Empty: none."""
    wandb_name: str = ""
    """Name of the run in --wandb-project. Empty: that of the --log-dir folder."""


@dataclass(frozen=True)
class PlanConfig:
    """Predictions for a cluster, made on any machine: no GPU, no data and no other ranks are needed."""

    plan: bool = False
    """Print the memory, traffic and step time that this command line would take on --world-size devices, write
    plan.json and plan.png into --log-dir, and end."""
    plan_search: bool = False
    """Search the fastest layouts of this model and --global-batch-size that fit on --world-size devices, print them as
    command lines, and end."""
    world_size: Annotated[int, Bounds(0, 10**6, "no job has as many ranks")] = 0
    """--plan, --plan-search: devices, one rank each. 0: --plan takes one."""
    device_type: str = ""
    """--plan, --plan-search: a device of scripts/devices, such as h100-80gb, or a TOML file like those; a cluster of
    its nodes is assumed. scripts/measure_device.py writes one for the machine that it runs on."""
    rehearse: str = ""
    """WORLD[:RANKS]: instead of training, run steps of one rank of WORLD on stand-in tensors with pretended peers, and
    report bytes by kind, every collective and the plan of a checkpoint, beside the estimate; with --log-dir also in
    rehearsal.json. Needs no data and no GPU. RANKS: one, several as 0,399, or stages for one per pipeline stage. Rank 0
    unless given."""
    rehearse_on: Literal["gpu", "cpu", "here"] = "gpu"
    """--rehearse: the device whose kernels and collectives are imitated (gpu: NCCL; cpu: gloo), or real tensors on the
    device of this machine, with pretended peers (here)."""
