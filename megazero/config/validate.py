"""Check a configuration before a process group or a file is made. Pure, except that it looks at folders.

Every refusal is a ValueError that names the flag, its value and the way out.
"""

from __future__ import annotations

import math
import re

from megazero.config.architectures import ARCHITECTURES
from megazero.config.flags import flags, value_of
from megazero.config.folders import check_project, check_writable
from megazero.config.limits import check_text, divisors, shorten
from megazero.config.schema import CheckpointConfig, Config, ModelConfig, PlanConfig

# Flags that name a file or a folder. --data-path and --tokenizer hold other words too, all of them shorter.
PATHS = ("data-path", "tokenizer", "save", "load", "log-dir", "tensorboard-dir", "device-type")

# Reading is light: one process per rank is ahead of any step. More than these only take memory.
MOST_WORKERS = 64


def check_values(config: Config) -> None:
    """Check each flag by itself, then the flags with each other.

    Raises:
        ValueError: naming the flag, its value and the way out.
    """
    value = {name: value_of(config, name) for name in flags()}
    for name, flag in flags().items():
        if flag.bounds and (complaint := flag.bounds.complaint(value[name])):
            raise ValueError(f"--{name} {shorten(value[name])}: {complaint}")
    for name, given in value.items():
        for text in given if isinstance(given, tuple) else (given,):
            if isinstance(text, str):
                check_text(name, text, is_path=name in PATHS)
    _check_model(config)
    _check_combinations(config)


def _check_architecture(model: ModelConfig) -> None:
    """Refuse options that only other architectures have."""
    known = ARCHITECTURES[model.architecture].options
    for name in sorted({option for entry in ARCHITECTURES.values() for option in entry.options} - set(known)):
        value, default = (getattr(m, name.replace("-", "_")) for m in (model, ModelConfig()))
        if value != default:
            others = " or ".join(other for other, entry in ARCHITECTURES.items() if name in entry.options)
            given = f"--{name}" if value is True else f"--{name} {value}"
            raise ValueError(
                f"{given} is nothing that --architecture {model.architecture} has; use {others}, or drop it"
            )
    heads, groups = model.num_attention_heads, model.query_groups
    if heads % groups:
        sizes = ", ".join(str(n) for n in divisors(heads) if n <= 64)
        raise ValueError(
            f"--num-query-groups {groups} does not divide --num-attention-heads {heads}; use one of {sizes}"
        )
    if "rotary-base" in known and model.head_dim % 2:
        raise ValueError(
            f"--hidden-size {model.hidden_size} / --num-attention-heads {heads} = {model.head_dim}: rotary "
            "positions need heads of an even size; change one of them"
        )


def _check_model(config: Config) -> None:
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    heads, hidden = model.num_attention_heads, model.hidden_size
    if hidden % heads:
        fits = min(divisors(hidden), key=lambda n: abs(n - heads))
        raise ValueError(f"--hidden-size {hidden} is not divisible by --num-attention-heads {heads}; use {fits} heads")
    _check_architecture(model)
    groups = model.query_groups
    for flag, size in (("num-attention-heads", heads), ("ffn-hidden-size", model.ffn_size)):
        if size % tp:
            both = [n for n in divisors(math.gcd(heads, model.ffn_size)) if groups % n == 0 or n % groups == 0]
            sizes = ", ".join(str(n) for n in both if n <= 64)
            raise ValueError(
                f"--{flag} {size} is not divisible by --tensor-model-parallel-size {tp}; "
                f"use a --tensor-model-parallel-size of {sizes}, or another --{flag}"
            )
    if groups % tp and tp % groups:
        possible = ", ".join(str(n) for n in divisors(heads) if n % tp == 0 or tp % n == 0)
        raise ValueError(
            f"--num-query-groups {groups} and --tensor-model-parallel-size {tp}: one must divide the "
            f"other, so that a rank has whole groups, or a part of one; use {possible} groups"
        )
    pp = config.parallel.pipeline_model_parallel_size
    if pp > model.num_layers:
        raise ValueError(
            f"--pipeline-model-parallel-size {pp} is more than --num-layers {model.num_layers}: "
            f"a stage would hold no layer; use at most {model.num_layers}"
        )


def _check_combinations(config: Config) -> None:
    _check_precision_and_zero(config)
    _check_schedule(config)
    _check_activations(config)
    _check_saving(config)
    check_project(config.log.wandb_project)
    _check_profile(config)
    _check_evaluation(config)
    _check_plan(config.plan)
    _check_mock_data(config)
    skipped_samples(config)
    _check_log(config)
    for flag in config.data.document_flags:
        if not (config.data.tokenizer or config.data.data_path or config.data.data_args_path):
            raise ValueError(f"{flag} needs --tokenizer, to know the end-of-document token")


def _check_precision_and_zero(config: Config) -> None:
    zero = config.zero
    precision, grad_dtype = config.training.precision, config.training.grad_dtype
    if precision == "fp64" and grad_dtype not in ("fp32", "fp64"):  # fp32 is the default, which stands for fp64 here
        raise ValueError(f"--grad-dtype {grad_dtype}: with --precision fp64, gradients are fp64 too; drop it")
    if grad_dtype == "fp64" and precision != "fp64":
        raise ValueError(f"--grad-dtype fp64 needs --precision fp64, and that is {precision}; use fp32, or change both")
    if precision == "fp64" and config.training.fused_kernels == "triton":
        raise ValueError("--fused-kernels triton with --precision fp64: there are no such kernels; use auto or eager")
    if zero.zero_shard_size and (zero.zero_stage == 0 or zero.zero_shard_size == 1):
        raise ValueError(
            f"--zero-shard-size {zero.zero_shard_size} at --zero-stage {zero.zero_stage} partitions nothing; "
            "use at least 2 and a stage of at least 1, or drop it"
        )
    if zero.zero_reduce_every == "step" and zero.zero_stage < 2:
        raise ValueError(
            f"--zero-reduce-every step is what --zero-stage {zero.zero_stage} does anyway; drop it, or use stage 2 or 3"
        )
    if zero.zero_gather_every == "step" and zero.zero_stage < 3:
        raise ValueError(
            f"--zero-gather-every step: --zero-stage {zero.zero_stage} gathers no weights; drop it, or use stage 3"
        )


def _check_schedule(config: Config) -> None:
    optimizer = config.optimizer
    ramp = config.training.rampup_batch_size
    if ramp and (len(ramp) != 3 or min(ramp) < 1):
        raise ValueError(
            f"--rampup-batch-size {' '.join(map(str, ramp))}: give three numbers of at least 1, START INCREMENT "
            "SAMPLES, such as 32 32 100000"
        )
    scale, least = config.training.initial_loss_scale, config.training.min_loss_scale
    if scale < least:
        raise ValueError(f"--initial-loss-scale {scale} is less than --min-loss-scale {least}; raise it")
    if optimizer.min_lr > optimizer.lr:
        raise ValueError(f"--min-lr {optimizer.min_lr} is more than --lr {optimizer.lr}; lower it")
    if optimizer.lr * optimizer.weight_decay > 1:
        raise ValueError(
            f"--weight-decay {optimizer.weight_decay} x --lr {optimizer.lr} is more than 1, so that an update would "
            "turn the sign of decayed weights; lower one of them"
        )
    last = optimizer.lr_decay_iters or config.training.train_iters
    if optimizer.lr_decay_style != "constant" and optimizer.lr_warmup_iters >= last:
        raise ValueError(
            f"--lr-warmup-iters {optimizer.lr_warmup_iters} leaves nothing of --lr-decay-iters {last} (--train-iters, "
            f"unless it is given) to decay in; use a --lr-warmup-iters of {last // 10}, or decay longer"
        )
    wsd, decay = optimizer.lr_decay_style == "wsd", optimizer.lr_wsd_decay_iters
    if wsd != (decay > 0):
        raise ValueError(
            f"--lr-wsd-decay-iters {decay} and --lr-decay-style {optimizer.lr_decay_style}: wsd decays in the last "
            f"iterations of --lr-decay-iters, and the other styles do not; give both, such as --lr-wsd-decay-iters "
            f"{max(1, last // 10)}, or neither"
        )
    if wsd and optimizer.lr_warmup_iters + decay > last:
        raise ValueError(
            f"--lr-warmup-iters {optimizer.lr_warmup_iters} and --lr-wsd-decay-iters {decay} are more than the "
            f"--lr-decay-iters {last} (--train-iters, unless it is given) that hold both; lower one of them"
        )


def _check_saving(config: Config) -> None:
    checkpoint = config.checkpoint
    for flag, interval in (("save-interval", checkpoint.save_interval), ("keep-last", checkpoint.keep_last)):
        if interval and not checkpoint.save:
            raise ValueError(f"--{flag} {interval} needs --save DIR to know where to")
    by_time = checkpoint.save_interval_minutes
    if checkpoint.save_interval and by_time not in (0.0, CheckpointConfig().save_interval_minutes):
        raise ValueError(
            f"--save-interval-minutes {by_time:g} with --save-interval {checkpoint.save_interval}: time asks for "
            "checkpoints only where iterations do not; give one of them"
        )
    if checkpoint.keep_every and not checkpoint.keep_last:
        raise ValueError(
            f"--keep-every {checkpoint.keep_every} without --keep-last keeps every checkpoint anyway; drop it"
        )
    folders = {"save": checkpoint.save, "log-dir": config.log.log_dir, "tensorboard-dir": config.log.tensorboard_dir}
    for flag, path in folders.items():
        # a plan or a rehearsal may be made on another machine than that of the run, and writes to --log-dir alone
        if path and (flag == "log-dir" or not (plans(config.plan) or config.plan.rehearse)):
            check_writable(flag, path)
    if checkpoint.finetune and not checkpoint.load:
        raise ValueError("--finetune needs --load DIR, to know whose weights to begin with")


def _check_log(config: Config) -> None:
    if config.log.wandb_project and not config.log.log_dir:
        raise ValueError(f"--wandb-project {shorten(config.log.wandb_project)} needs --log-dir DIR for its files")
    prompts, interval = config.log.sample_prompts, config.log.sample_interval
    if bool(prompts) != (interval > 0):
        there, missing = f"--sample-prompts {shorten(prompts)}", "--sample-interval N"
        if interval:
            there, missing = f"--sample-interval {interval}", "--sample-prompts FILE"
        raise ValueError(f"{there} needs {missing}, to say {'when' if prompts else 'what'} to sample")
    if config.log.wandb_name and not config.log.wandb_project:
        raise ValueError(f"--wandb-name {shorten(config.log.wandb_name)} needs --wandb-project PROJECT")


def _check_mock_data(config: Config) -> None:
    data, evaluation = config.data, config.evaluation
    if not data.mock_data:
        return
    if data.data_path or data.data_args_path:
        named = f"--data-path {shorten(' '.join(data.data_path))}" * bool(data.data_path)
        raise ValueError(
            f"--mock-data with {named or f'--data-args-path {shorten(data.data_args_path)}'}: one makes up tokens, the "
            "other names the corpora to train on; drop one of them"
        )
    if not evaluation.eval_iters and (evaluation.eval_interval or evaluation.eval_only):
        raise ValueError("--eval-iters 0 evaluates a whole split, and those of --mock-data are endless; use 10")


def plans(plan: PlanConfig) -> bool:
    """Return true if the command line asks for a prediction instead of a run."""
    return plan.plan or plan.plan_search


def _check_plan(plan: PlanConfig) -> None:
    asked = "--plan-search" if plan.plan_search else "--plan"
    if plan.plan and plan.plan_search:
        raise ValueError("--plan and --plan-search: one predicts this layout, the other looks for better ones; use one")
    if plans(plan) and plan.rehearse:
        raise ValueError(f"--rehearse {plan.rehearse} with {asked}: both end before training; use one after the other")
    if plans(plan) and not plan.device_type:
        raise ValueError(
            f"{asked} needs --device-type, whose speed and memory it assumes: a name of scripts/devices, such as "
            "--device-type h100-80gb, or a TOML file, such as scripts/measure_device.py --output FILE makes of this CPU"
        )
    if plan.plan_search and not plan.world_size:
        raise ValueError("--plan-search needs --world-size, the number of devices, such as --world-size 400")
    for flag, value in (("world-size", plan.world_size), ("device-type", plan.device_type)):
        if value and not plans(plan):
            raise ValueError(f"--{flag} {value} is about --plan and --plan-search; add one of them, or drop it")


def check_device(config: Config, device_type: str) -> None:
    """Refuse what the device cannot do.

    Raises:
        ValueError: gradients of a type that a GPU's matrix products do not return; Triton's kernels or CUDA graphs on
            a CPU.
    """
    precision, grad_dtype = config.training.precision, config.training.grad_dtype
    if device_type == "cpu" and config.training.fused_kernels == "triton":
        raise ValueError(
            "--fused-kernels triton: Triton's kernels need a GPU, and the device is cpu; use auto or eager"
        )
    if device_type == "cpu" and config.training.cuda_graph_impl == "local":
        raise ValueError("--cuda-graph-impl local: CUDA graphs need a GPU, and the device is cpu; use none")
    if device_type == "cuda" and grad_dtype not in ("fp32", precision) and precision != "fp64":
        raise ValueError(
            f"--grad-dtype {grad_dtype} with --precision {precision}: a GPU's matrix products return the type of their "
            "factors, or fp32; use --grad-dtype fp32" + f" or {precision}" * (precision != "fp32")
        )


def _check_evaluation(config: Config) -> None:
    evaluation = config.evaluation
    if evaluation.eval_only and not config.checkpoint.load:
        raise ValueError("--eval-only needs --load DIR, to know which checkpoint to evaluate")
    if evaluation.eval_split != "validation" and not evaluation.eval_only:
        raise ValueError(
            f"--eval-split {evaluation.eval_split}: during training the validation split is evaluated; add --eval-only "
            "to evaluate a checkpoint on this one, or drop it"
        )


def iteration_range(text: str) -> tuple[int, int]:
    """Read --profile-iterations: the first and the last iteration to trace.

    Raises:
        ValueError: it is no such range.
    """
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise ValueError(
            f"--profile-iterations {text}: must be A:B, the first and the last iteration to trace, counted from 1, "
            "such as 10:12"
        )
    return int(first), int(last)


def _check_profile(config: Config) -> None:
    text, iterations = config.log.profile_iterations, config.training.train_iters
    if not text:
        return
    _, last = iteration_range(text)
    if last > iterations:
        raise ValueError(
            f"--profile-iterations {text}: iteration {last} is not reached, for --train-iters is {iterations}; end "
            "the range earlier, or train longer"
        )
    if not config.log.log_dir:
        raise ValueError(f"--profile-iterations {text} needs --log-dir DIR for the trace")


def skipped_samples(config: Config) -> range:
    """The samples that --skip-samples leaves out; ValueError unless it is A:B with 0 <= A < B."""
    given = config.data.skip_samples
    found = re.fullmatch(r"([0-9]{1,18}):([0-9]{1,18})", given)
    if given and not (found and int(found[1]) < int(found[2])):
        raise ValueError(f"--skip-samples {given}: give A:B, two sample numbers, A less than B, such as 4096:8192")
    return range(int(found[1]), int(found[2])) if found else range(0)


def _check_activations(config: Config) -> None:
    activations, tp = config.activations, config.parallel.tensor_model_parallel_size
    sequence, recompute = config.parallel.sequence_parallel, activations.recompute
    if recompute != "full":
        for flag, does in (
            ("partition-activations", activations.partition_activations),
            ("checkpoint-in-cpu", activations.checkpoint_in_cpu),
            ("contiguous-checkpointing", activations.contiguous_checkpointing),
        ):
            if does:
                raise ValueError(
                    f"--{flag} is about the blocks' inputs that --recompute full keeps; with --recompute {recompute} "
                    "there are none; add --recompute full, or drop this flag"
                )
    if activations.partition_activations and tp == 1:
        raise ValueError(
            "--partition-activations partitions over tensor-parallel ranks, and --tensor-model-parallel-size is 1; "
            "raise it, or drop this flag"
        )
    if activations.partition_activations and sequence:
        raise ValueError(
            "--partition-activations has nothing to partition with --sequence-parallel, under which each "
            "tensor-parallel rank has its own part of a block's input; drop one of them"
        )
    if sequence and tp == 1:
        raise ValueError(
            "--sequence-parallel cuts the tokens over tensor-parallel ranks, and --tensor-model-parallel-size is 1; "
            "raise it, or drop this flag"
        )
    micro, length = config.training.micro_batch_size, config.model.seq_length
    if sequence and micro * length % tp:
        fits = tp // math.gcd(tp, length)
        raise ValueError(
            f"--sequence-parallel cuts the --micro-batch-size {micro} x --seq-length {length} = {micro * length} "
            f"tokens of a micro-batch over --tensor-model-parallel-size {tp}, which does not divide them; use a "
            f"--micro-batch-size that is a multiple of {fits}"
        )
