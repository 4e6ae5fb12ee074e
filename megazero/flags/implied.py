"""Layers of values that follow from given ones: a branch, the length in tokens, the defaults on a GPU. Pure."""

import math
import re
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from megazero.engine.options.option import OnGpu
from megazero.engine.options.schema import Precision
from megazero.flags.batch_ramp import batch_sizes, data_parallel_size
from megazero.flags.config import Config
from megazero.flags.flag_names import as_flag, flags
from megazero.flags.limit_checks import out_of_range
from megazero.flags.stack import Stack

TRAIN_LENGTH = frozenset({"train-iters", "train-tokens"})  # the command line's replaces that of a preset
# Flags that a branch sets: the command line leaves them out, and those of a preset give way.
SETS = ("load", "train-iters", "lr-decay-style", "lr-decay-iters", "lr-wsd-decay-iters")


# -- a branch


def branch(stack: Stack, typed: Collection[str]) -> tuple[Stack, str]:
    """Return the stack with the flags that --decay-from stands for, and a line that names them.

    --load is --save: `resume.find_checkpoint` takes the checkpoint of --decay-from while --save holds none.

    Args:
        typed: flags of the command line, without dashes.

    Raises:
        ValueError: --decay-from names no checkpoint; --save is its run's folder; or a flag is given that a branch sets.
    """
    options = stack.config.checkpoint
    if not (options.decay_from and options.decay_iters > 0 and options.save):
        return stack, ""  # `check_values` refuses such flags
    given, source, save = f"--decay-from {options.decay_from}", Path(options.decay_from), Path(options.save)
    name = re.fullmatch(r"iter_(\d{7,})", source.name)
    if name is None:
        raise ValueError(f"{given} is not a checkpoint; name one, as in --decay-from {source}/iter_0001000")
    for flag in (*SETS, "train-tokens", "finetune"):
        if flag in typed:
            raise ValueError(f"--{flag} and {given}: the branch has its own; leave out --{flag}")
    if save.resolve() in (source.resolve(), source.resolve().parent):
        raise ValueError(
            f"--save {save} is the folder of {given}, whose run would be changed; name a folder of its own"
        )
    last = int(name[1]) + options.decay_iters
    values = dict(zip(SETS, (options.save, last, "wsd", last, options.decay_iters), strict=True))
    stack = stack.over("--decay-from", {**values, "finetune": False, "train-tokens": 0})
    words = " ".join(as_flag(flag, value) for flag, value in values.items() if flag != "load")
    return stack, f"{given} --decay-iters {options.decay_iters}: a branch, with {words}; it resumes from {save}"


# -- the length of the run


def count_iterations(stack: Stack, typed: Collection[str], num_ranks: Callable[[], int]) -> tuple[Stack, str]:
    """Return the stack with the iterations that --train-tokens takes, rounded up, and a line for them.

    The line is empty without --train-tokens, and with a recipe, which counts them for its own batch.

    Args:
        typed: flags of the command line, without dashes. There, one of the two flags counts, if a preset has the other.
        num_ranks: returns the number of ranks of the run.

    Raises:
        ValueError: the command line gives both flags, or stages or a branch, which have a length of their own; or the
            number is out of bounds.
    """
    config = stack.config
    training, tokens = config.training, config.training.train_tokens
    given = f"--train-tokens {tokens}"
    if {"train-iters", "train-tokens"} <= {*typed}:
        raise ValueError(f"{given} and --train-iters {training.train_iters}: give one of them")
    instead = TRAIN_LENGTH & {*typed}
    if instead and (tokens or "train-iters" in typed):  # --train-tokens 0 asks for no length
        stack = stack.over(f"--{min(instead)}", {}, undone=stack.given & TRAIN_LENGTH - {*typed})
    if not tokens or training.recipe == "auto":
        return stack, ""
    _check_bounds("train-tokens", tokens, given)
    if "train-iters" in typed:
        return stack, ""
    for flag, is_set in (("--data-stages", config.data.data_stages), ("--decay-from", config.checkpoint.decay_from)):
        if is_set:
            raise ValueError(f"{given} with {flag}: its samples or iterations are counted; give --train-iters instead")
    parallel, seq = config.parallel, config.model.seq_length
    pp, tp, cp = (
        parallel.pipeline_model_parallel_size,
        parallel.tensor_model_parallel_size,
        parallel.context_parallel_size,
    )
    replicas = max(1, data_parallel_size(num_ranks(), pp, tp, cp)) if not training.global_batch_size else 1
    batch = training.global_batch_size or training.micro_batch_size * replicas
    sizes = replace(batch_sizes(config), full=batch)
    iterations = math.ceil(sizes.iterations(-(-tokens // seq)))
    _check_bounds("train-iters", iterations, f"{given}: {iterations} iterations of {batch} samples")
    total = sizes.total(iterations) * seq
    line = f"{given}: {iterations:,} iterations of {batch:,} samples of {seq:,} tokens, rounded up to {total:,} tokens"
    return stack.over("--train-tokens", {"train-iters": iterations}), line


def _check_bounds(flag: str, value: int, text: str) -> None:
    bounds = flags()[flag].bounds
    if bounds and (complaint := out_of_range(value, bounds)):
        raise ValueError(f"{text}: {complaint}")


# -- defaults on GPUs


def gpu_defaults(config: Config, given: Collection[str], precision: Precision | None) -> tuple[dict[str, Any], str]:
    """Choose values of flags that are not given, such as a precision and a warm-up.

    Args:
        config: not resolved yet.
        given: names of the flags, without dashes, that the command line or its preset set.
        precision: the one that the GPU multiplies fastest in: bf16; fp16 on a GPU that imitates bf16, such as a V100;
            fp32 on one without tensor cores; None: the device is no GPU.

    Returns:
        The values by flag, and a line that reports them; empty if there are none.
    """
    chosen = dict[str, Any]()
    for name, flag in flags().items():
        on_gpu = flag.first(OnGpu)
        if precision is None or on_gpu is None or name in given:
            continue
        if (value := on_gpu.choose(config, precision)) != flag.default:
            chosen[name] = value
    if not chosen:
        return {}, ""
    words = " and ".join(as_flag(*each) for each in chosen.items())
    words = words.replace("--precision fp16", "--precision fp16 with loss scaling (this GPU has no bf16)")
    without = " ".join(as_flag(name, flags()[name].default) for name in chosen)
    return chosen, f"{words}, the default on GPUs ({without}: without)"
