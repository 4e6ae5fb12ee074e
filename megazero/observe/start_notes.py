"""Lines of the start screen that warn: a slow precision, nothing kept, a vocabulary too large.

Pure, except `this_processor`.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from megazero.config.schema import Config

# From how many times the ids of the tokenizer on a vocabulary is told; padding to a multiple stays far below.
LARGE_VOCABULARY = 2
# Instructions of a CPU that multiply matrices of a narrow type; without them they are slower than fp32's.
FAST_TYPES = {"bf16": ("amx_bf16", "avx512_bf16"), "fp16": ("amx_fp16", "avx512_fp16")}


class Processor(NamedTuple):
    """The CPU that this rank computes on: its number of threads, and the precisions that are slower than fp32 there."""

    threads: int
    slow_types: tuple[str, ...] = ()


def this_processor() -> Processor:
    """Return the CPU of this process."""
    try:
        words = set((Path("/proc/cpuinfo").read_text()).split())
    except OSError:
        words = set()
    x86 = "sse2" in words  # instructions of other architectures are not known here
    slow = tuple(name for name, fast in FAST_TYPES.items() if x86 and not words.intersection(fast))
    return Processor(torch.get_num_threads(), slow)


def device_words(config: Config, name: str, processor: Processor | None) -> str:
    """Name the device of a rank; for a CPU (None: it is none) with its threads and whether it is slow at --precision.

    Args:
        name: "CPU", or that of a GPU.
    """
    if processor is None:
        return name
    precision = config.training.precision
    slow = f"; {precision} is slower than fp32 on this CPU, which has no AMX" * (precision in processor.slow_types)
    return f"{name}, {processor.threads} thread{'s' * (processor.threads > 1)}{slow}"


def kept(config: Config) -> str:
    """Name what a run does not keep, and the flags that keep it; empty where it keeps all, or only evaluates."""
    if config.evaluation.eval_only or (config.checkpoint.save and config.log.log_dir):
        return ""
    if config.checkpoint.save:
        return "checkpoints alone: --log-dir DIR keeps metrics and report.html"
    if config.log.log_dir:
        return "metrics and report.html, no checkpoint: --save DIR keeps checkpoints"
    return "nothing: --save DIR keeps checkpoints, --log-dir DIR metrics and report.html"


def large_vocabulary(config: Config, num_ids: int) -> str:
    """Say where --vocab-size is many times what the data needs; else empty.

    Args:
        num_ids: of the tokenizer; 0 without one.
    """
    size = config.model.vocab_size
    if config.data.mock_data or not num_ids or size <= LARGE_VOCABULARY * num_ids:
        return ""
    return (
        f"--vocab-size {size} is {size / num_ids:.0f} times the {num_ids:,} ids of the tokenizer: the other rows are "
        f"never used, and cost memory and time; --vocab-size {num_ids} suffices"
    )
