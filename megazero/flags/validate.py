"""Check a configuration before a process group or a file is made. Pure, except that it tries folders.

Every refusal is a ValueError that names the flag, its value and the way out.
"""

import functools
import math
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megazero.engine.options.option import Requires, RequiresAny, Role, Written
from megazero.files import explain, refuse_in_checkpoint
from megazero.flags.config import Config, PlanConfig
from megazero.flags.corpus_flags import document_flags
from megazero.flags.flag_names import LAYOUT_FLAGS, as_flag, flags, sections, value_of, with_values
from megazero.flags.limit_checks import check_text, out_of_range, shorten
from megazero.flags.rules import RULES
from megazero.flags.validate_model import check_model

FLASH_WIDTH, FLASH_STEP = 256, 8  # of attention heads: the largest, and the divisor of all that FlashAttention takes

WANDB_REFUSES = r"[/\\#?%:]|.{129}"  # a project's name that matches


def check_values(config: Config) -> None:
    """Check each flag by itself, then the flags with each other.

    Raises:
        ValueError: a line for each fault, which names the flag, its value and the way out.
    """
    faults: dict[str, str] = {}
    for group, section in sections(config):
        faults |= _section_faults(group, section)
    # The checks below may rely on bounds, so they see defaults in place of these values.
    sound, found = with_values(config, {name: flags()[name].default for name in faults}), [*faults.values()]
    checks: list[Callable[[Config], object]] = [
        *(lambda c: elastic_nodes(c.parallel.elastic), check_model, _check_needs, _check_wandb),
        *(_check_precision_and_zero, _check_learning_rate, _check_rules),
        *([] if searches(config) else [_check_layout]),  # the flags that it needs may be chosen yet
        *(_check_saving, lambda c: _check_plan(c.plan, c.parallel.layout == "auto"), _check_data),
    ]
    for check in checks:
        try:
            check(sound)
        except ValueError as error:
            if not any(f"--{name} " in f"{error} " for name in faults):
                found.append(str(error))
    if found:
        raise ValueError("\n".join(found))


@functools.lru_cache(maxsize=256)  # a search checks thousands of configurations, which have most sections in common
def _section_faults(group: str, section: Any) -> dict[str, str]:
    """Check each flag of a group by itself: name -> fault."""
    found = {}
    for name, flag in flags().items():
        if flag.group != group:
            continue
        given = getattr(section, name.replace("-", "_"))
        if flag.bounds and (complaint := out_of_range(given, flag.bounds)):
            found[name] = f"--{name} {shorten(given)}: {complaint}"
        try:
            for text in given if isinstance(given, tuple) else (given,):
                if isinstance(text, str):
                    check_text(name, text, is_path=Role.PATH in flag.facts)
        except ValueError as error:
            found[name] = str(error)
    return found


def _check_wandb(config: Config) -> None:
    if re.search(WANDB_REFUSES, config.log.wandb_project):
        raise ValueError(
            f"--wandb-project {shorten(config.log.wandb_project)}: Weights & Biases allows at most 128 characters and "
            "none of / \\ # ? % : in the name of a project; use another"
        )


def elastic_nodes(text: str) -> range:
    """Return the numbers of nodes that --elastic allows, none without the flag. ValueError if it is no MIN:MAX."""
    if not text:
        return range(0)
    found = re.fullmatch(r"(\d{1,6}):(\d{1,6})", text)
    least, most = map(int, found.groups()) if found else (0, 0)
    if not 1 <= least <= most:
        raise ValueError(
            f"--elastic {shorten(text)}: give the least and the largest number of nodes as MIN:MAX, such as 6:8"
        )
    return range(least, most + 1)


def _check_rules(config: Config) -> None:
    kept = [rule.refusal(config) for rule in RULES if not (rule.of_layout and searches(config))]
    if found := [refusal for refusal in kept if refusal]:
        raise ValueError("\n".join(found))


def _check_needs(config: Config) -> None:
    """Refuse flags without those that they need."""
    found = []
    for name in filter(functools.partial(lacks_needed, config), flags()):
        needs, given = flags()[name].all(Requires), shorten(as_flag(name, value_of(config, name)))
        if needs:
            added = "both" if len(needs) > 1 else "it"
            found.append(f"{given} needs {needed_words(name)}; add {added}, or drop --{name}")
        else:
            found.append(f"{given} needs {needed_words(name)}; add one of them, or drop it")
    if found:
        raise ValueError("\n".join(found))


def needed_words(name: str) -> str:
    """Return the flags that a flag needs, as the command line has them."""
    if any_of := flags()[name].first(RequiresAny):
        *others, last = (as_needed(*way) for way in any_of.ways)
        return f"{', '.join(others)} or {last}"
    words = [as_needed(*needs) for needs in flags()[name].all(Requires)]
    return (", and " if ", " in words[0] else " and ").join(words)


def as_needed(name: str, value: Any) -> str:
    """Return a flag and the value that another flag needs; None: any value but the default."""
    written = flags()[name].first(Written)
    shown = value if value is not None else written.value if written else ""
    return f"--{name} {shown}".rstrip()


def lacks_needed(config: Config, name: str) -> bool:
    """Return whether a flag is given without those that it needs."""
    flag = flags()[name]
    undecided = searches(config) and name in LAYOUT_FLAGS
    if undecided or value_of(config, name) == flag.default:
        return False

    def lacks(other: str, value: Any) -> bool:
        found = value_of(config, other)
        return bool(found == flags()[other].default if value is None else found != value)

    ways = [way for any_of in flag.all(RequiresAny) for way in any_of.ways]
    return any(lacks(*needs) for needs in flag.all(Requires)) or bool(ways and all(lacks(*way) for way in ways))


def _check_precision_and_zero(config: Config) -> None:
    zero, training = config.zero, config.training
    precision, grad_dtype = training.precision, training.grad_dtype
    if grad_dtype == "fp64" and precision != "fp64":
        raise ValueError(f"--grad-dtype fp64 needs --precision fp64, and that is {precision}; use fp32, or change both")
    if precision == "fp64" and training.fused_kernels == "triton":
        raise ValueError("--fused-kernels triton with --precision fp64: there are no such kernels; use auto or eager")
    if config.optimizer.master_weights == "split" and precision != "bf16":
        raise ValueError(
            f"--master-weights split with --precision {precision}: weights of bf16 alone are the upper bits of fp32 "
            "ones; use --precision bf16, or --master-weights fp32"
        )
    scale, least = training.initial_loss_scale, training.min_loss_scale
    if scale < least:
        raise ValueError(f"--initial-loss-scale {scale} is less than --min-loss-scale {least}; raise it")
    if config.optimizer.optimizer_cpu_offload and config.optimizer.rules.matrices.whole_matrices:
        raise ValueError(
            f"--optimizer-cpu-offload with --optimizer {config.optimizer.optimizer}: its updates are matrix products, "
            "which CPUs compute too slowly; use --optimizer adamw, or drop --optimizer-cpu-offload"
        )
    copies = {"async-save": config.checkpoint.async_save}
    copies["memory-checkpoint-interval"] = bool(config.checkpoint.memory_checkpoint_interval)
    for flag in (name for name, given in copies.items() if given and config.optimizer.optimizer_nvme_offload):
        raise ValueError(
            f"--{flag} with --optimizer-nvme-offload: a save in the background copies all states to host memory; drop "
            "one of them"
        )
    if zero.zero_shard_size and (zero.zero_stage == 0 or zero.zero_shard_size == 1):
        raise ValueError(
            f"--zero-shard-size {zero.zero_shard_size} at --zero-stage {zero.zero_stage} partitions nothing; "
            "use at least 2 and a stage of at least 1, or drop it"
        )


def _check_learning_rate(config: Config) -> None:
    optimizer, ramp = config.optimizer, config.training.rampup_batch_size
    if ramp and (len(ramp) != 3 or min(ramp) < 1):
        raise ValueError(
            f"--rampup-batch-size {' '.join(map(str, ramp))}: give three numbers of at least 1, START INCREMENT "
            "SAMPLES, such as 32 32 100000"
        )
    if optimizer.lr * optimizer.weight_decay > 1:
        raise ValueError(
            f"--weight-decay {optimizer.weight_decay} x --lr {optimizer.lr} is more than 1, so that an update would "
            "change the sign of weights; lower one of them"
        )


def _check_layout(config: Config) -> None:
    """Refuse flags that the rest of the layout does not allow."""
    zero = config.zero
    for flag, every, stage in (("reduce", zero.zero_reduce_every, 2), ("gather", zero.zero_gather_every, 3)):
        if every == "step" and zero.zero_stage < stage:
            raise ValueError(
                f"--zero-{flag}-every step needs --zero-stage {stage} or higher; raise it, or drop this flag"
            )
    tp, sequence = config.parallel.tensor_model_parallel_size, config.parallel.sequence_parallel
    if config.activations.partition_activations and sequence:
        raise ValueError(
            "--partition-activations with --sequence-parallel: each tensor-parallel rank already has only a part of a "
            "block's input; drop one of them"
        )
    micro, length = config.training.micro_batch_size, config.model.seq_length
    if sequence and micro * length % tp:
        raise ValueError(
            f"--sequence-parallel needs --micro-batch-size {micro} x --seq-length {length} to be divisible by "
            f"--tensor-model-parallel-size {tp}; use a --micro-batch-size that is a multiple of "
            f"{tp // math.gcd(tp, length)}"
        )


def _check_saving(config: Config) -> None:
    checkpoint = config.checkpoint
    folders = {"save": checkpoint.save, "save-hf": checkpoint.save_hf, "log-dir": config.log.log_dir}
    folders["tensorboard-dir"] = config.log.tensorboard_dir
    folders["memory-checkpoint-dir"] = checkpoint.memory_checkpoint_dir
    if checkpoint.save_hf and Path(checkpoint.save_hf).resolve() == Path(checkpoint.save).resolve():
        raise ValueError(
            f"--save-hf {shorten(checkpoint.save_hf)} is the folder of --save, whose checkpoints have the same names; "
            "name another"
        )
    for flag, path in folders.items():
        # a plan or a rehearsal may be made on another machine than that of the run, and writes to --log-dir alone
        if path and (flag == "log-dir" or not (plans(config.plan) or config.plan.rehearse)):
            _check_writable(flag, Path(path))


def _check_writable(flag: str, path: Path) -> None:
    """Write a file without a name to a folder, or to the nearest one that exists, before hours of work."""
    try:
        refuse_in_checkpoint(path)
    except ValueError as error:
        raise ValueError(f"--{flag} {error}") from None
    try:
        nearest = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        if not nearest.is_dir():
            raise ValueError(f"--{flag} {path}: {nearest} is a file, not a folder; name another")
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        reason = explain(OSError(error.errno, os.strerror(error.errno or 0)))
        raise ValueError(f"--{flag} {shorten(path)}: cannot write there: {reason}") from None


def _check_data(config: Config) -> None:
    data, evaluation = config.data, config.evaluation
    skipped_samples(config)
    for flag in document_flags(data):
        if not (data.tokenizer or data.data_path or data.data_args_path):
            raise ValueError(f"{flag} needs --tokenizer, because it looks for the end-of-document token")
    if data.mock_data and data.packing != "split":
        raise ValueError(
            f"--packing {data.packing} with --mock-data: made-up tokens have no documents to pack; drop one of them"
        )
    if data.mock_data and not evaluation.eval_iters and (evaluation.eval_interval or evaluation.eval_only):
        raise ValueError("--eval-iters 0 evaluates a whole split, and those of --mock-data are endless; use 10")


def plans(plan: PlanConfig) -> bool:
    """Return True if the command line asks for a prediction instead of a run."""
    return plan.plan or plan.plan_search


def searches(config: Config) -> bool:
    """Return True if the flags of the layout that are not given will be chosen."""
    return config.parallel.layout == "auto" or config.plan.plan_search


def _check_plan(plan: PlanConfig, auto: bool) -> None:
    if plan.plan and plan.plan_search:
        raise ValueError("--plan and --plan-search: one predicts this layout, the other looks for better ones; use one")
    if plans(plan) and plan.rehearse:
        asked = "--plan-search" if plan.plan_search else "--plan"
        raise ValueError(f"--rehearse {plan.rehearse} with {asked}: both end before training; use one after the other")
    if plan.plan_search and auto:
        raise ValueError(
            "--plan-search with --layout auto: the search prints layouts, and sets none; use --plan, or run"
        )


# Precisions in which a device attends to blocks of keys by a fused kernel
FUSED_PRECISIONS = {"cuda": ("bf16", "fp16"), "cpu": ("fp32", "fp64")}


def check_device(config: Config, device_type: str) -> None:
    """Refuse flags that the device does not support.

    Raises:
        ValueError: gradients of a type that a GPU's matrix products do not return; heads that a GPU's attention does
            not compute; a ring of keys without fused attention; Triton's kernels on a CPU.
    """
    precision, grad_dtype = config.training.precision, config.training.grad_dtype
    if device_type == "cpu" and config.training.fused_kernels == "triton":
        raise ValueError("--fused-kernels triton needs a GPU, and the device is cpu; use auto or eager")
    if device_type == "cuda" and grad_dtype not in ("fp32", precision) and precision != "fp64":
        either = "fp32" if precision == "fp32" else f"fp32 or {precision}"
        raise ValueError(
            f"--grad-dtype {grad_dtype} with --precision {precision}: a GPU's matrix products return the type of their "
            f"factors, or fp32; use --grad-dtype {either}"
        )
    if config.parallel.cp_exchange == "ring" and (reason := ring_refusal(config, device_type)):
        raise ValueError(f"--cp-exchange ring with {reason}; use all-gather, or auto")
    if device_type == "cuda" and precision in FUSED_PRECISIONS["cuda"]:
        _check_flash_heads(config)


def ring_refusal(config: Config, device_type: str = "") -> str:
    """Return why keys and values cannot be exchanged in a ring, in words that follow "with"; empty if they can.

    Args:
        device_type: cpu or cuda; empty if it is not known yet.
    """
    model, precision = config.model, config.training.precision
    flags = {
        f"--attention-dropout {model.attention_dropout:g}": model.attention_dropout > 0,
        f"--attention-softcap {model.attention_softcap:g}": model.attention_softcap > 0,
        f"--window-size {model.window_size}": model.window_size > 0,
    }
    for flag, given in flags.items():
        if given:
            return f"{flag}, which needs all keys at once"
    fused = FUSED_PRECISIONS.get(device_type, (precision,))
    if precision not in fused:
        return f"--precision {precision} on {device_type}: attention to blocks of keys needs {' or '.join(fused)} there"
    return ""


def _check_flash_heads(config: Config) -> None:
    """Refuse heads that FlashAttention does not compute if torch has no other kernel: of pieces of samples."""
    model, width, cp = config.model, config.model.head_dim, config.parallel.context_parallel_size
    explicit = model.attention_dropout > 0 or model.attention_softcap > 0
    flags = {
        "--reset-attention-mask": config.data.reset_attention_mask,
        f"--window-size {model.window_size}": 0 < model.window_size < model.seq_length,
        f"--context-parallel-size {cp}": cp > 1,
        f"--architecture {model.architecture}": model.attention_sinks,
    }
    flag = next((flag for flag, given in flags.items() if given), "")
    if explicit or not flag:
        return
    if width > FLASH_WIDTH or width % FLASH_STEP:
        near = min(FLASH_WIDTH, -(-width // FLASH_STEP) * FLASH_STEP)
        use = f"--kv-channels {near}"
        if model.multi_latent_attention:
            use = f"--qk-head-dim {near - model.qk_pos_emb_head_dim}"
        raise ValueError(
            f"{flag} with heads of width {width} in {config.training.precision} on a GPU: FlashAttention needs "
            f"a multiple of {FLASH_STEP}, at most {FLASH_WIDTH}; use {use}, or --precision fp32"
        )


def skipped_samples(config: Config) -> range:
    """Return the samples that --skip-samples leaves out; ValueError unless it is A:B with 0 <= A < B."""
    given = config.data.skip_samples
    found = re.fullmatch(r"([0-9]{1,18}):([0-9]{1,18})", given)
    if given and not (found and int(found[1]) < int(found[2])):
        raise ValueError(f"--skip-samples {given}: give A:B, two sample numbers, A less than B, such as 4096:8192")
    return range(int(found[1]), int(found[2])) if found else range(0)
