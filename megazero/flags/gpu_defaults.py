"""Defaults that differ on GPUs, for flags that neither the command line nor its preset gives."""

from collections.abc import Collection
from typing import Any

from megazero.engine.options.option import OnGpu
from megazero.engine.options.schema import Precision
from megazero.flags.config import Config
from megazero.flags.flag_names import as_flag, flags


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
