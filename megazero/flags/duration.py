"""--train-tokens as --train-iters. Pure."""

import math
from collections.abc import Callable, Collection
from dataclasses import replace

from megazero.flags.batch_ramp import batch_sizes, data_parallel_size
from megazero.flags.flag_names import flags
from megazero.flags.limit_checks import out_of_range
from megazero.flags.stack import Stack

TRAIN_LENGTH = frozenset({"train-iters", "train-tokens"})  # the command line's replaces that of a preset


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
    if instead := TRAIN_LENGTH & {*typed}:  # of those of a preset
        stack = stack.over(f"--{min(instead)}", {}, undone=stack.given & TRAIN_LENGTH - {*typed})
    if not tokens or training.recipe == "auto":
        return stack, ""
    _check("train-tokens", tokens, given)
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
    _check("train-iters", iterations, f"{given}: {iterations} iterations of {batch} samples")
    total = sizes.total(iterations) * seq
    line = f"{given}: {iterations:,} iterations of {batch:,} samples of {seq:,} tokens, rounded up to {total:,} tokens"
    return stack.over("--train-tokens", {"train-iters": iterations}), line


def _check(flag: str, value: int, text: str) -> None:
    bounds = flags()[flag].bounds
    if bounds and (complaint := out_of_range(value, bounds)):
        raise ValueError(f"{text}: {complaint}")
