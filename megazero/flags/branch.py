"""The flags of a branch: --decay-from S/iter_N --decay-iters K decays from a checkpoint of a run."""

import re
from collections.abc import Collection
from pathlib import Path

from megazero.flags.flag_names import as_flag
from megazero.flags.stack import Stack

# Flags that a branch sets: the command line leaves them out, and those of a preset give way.
SETS = ("load", "train-iters", "lr-decay-style", "lr-decay-iters", "lr-wsd-decay-iters")


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
    flags = dict(zip(SETS, (options.save, last, "wsd", last, options.decay_iters), strict=True))
    stack = stack.over("--decay-from", {**flags, "finetune": False, "train-tokens": 0})
    words = " ".join(as_flag(flag, value) for flag, value in flags.items() if flag != "load")
    return stack, f"{given} --decay-iters {options.decay_iters}: a branch, with {words}; it resumes from {save}"
