"""Lines of the start screen on what a user may not expect: busy cores, nothing kept, a vocabulary too large.

Pure, except `read_load` and `this_processor`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import torch

from megazero.comm.world import World, local_size
from megazero.config.schema import Config

# From how many times the ids of the tokenizer on a vocabulary is told; padding to a multiple stays far below.
LARGE_VOCABULARY = 2
# Instructions of a CPU that multiply matrices of a narrow type; without them they are slower than fp32's.
FAST_TYPES = {"bf16": ("amx_bf16", "avx512_bf16"), "fp16": ("amx_fp16", "avx512_fp16")}


class Processor(NamedTuple):
    """The CPU that this rank computes on.

    Attributes:
        threads: with which a rank computes.
        ranks: that share `cores`.
        cores: on which this process may run.
        machine_cores: of the whole machine.
        load: processes of others that run or wait to run, on the whole machine.
        slow_types: precisions that this CPU computes slower than fp32.
    """

    threads: int
    ranks: int
    cores: int
    machine_cores: int
    load: float = 0.0
    slow_types: tuple[str, ...] = ()


def read_load(root: Path = Path("/")) -> float:
    """Return how many processes of others run: the mean over a minute, or those that run now where they are fewer.

    A run that ended a moment ago is still in the mean. To be called before this process computes anything.

    Args:
        root: the folder that holds proc/.
    """
    try:
        mean, _, _, running, _ = (root / "proc/loadavg").read_text().split()
        return max(0.0, min(float(mean), int(running.split("/")[0]) - 1))
    except (OSError, ValueError):  # not Linux
        return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def this_processor(world: World, load: float) -> Processor:
    """Look at the CPU of this process.

    Args:
        load: see `read_load`.
    """
    everywhere = os.cpu_count() or 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else everywhere
    bound = world.launcher == "srun" and cores < everywhere  # SLURM gives each task cores of its own
    try:
        words = set((Path("/proc/cpuinfo").read_text()).split())
    except OSError:
        words = set()
    x86 = "sse2" in words  # names of others' instructions are not known here
    slow = tuple(name for name, fast in FAST_TYPES.items() if x86 and not words.intersection(fast))
    return Processor(torch.get_num_threads(), 1 if bound else local_size(world), cores, everywhere, load, slow)


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


def busy(processor: Processor | None) -> str:
    """Warn where this run's threads and other processes together are more than the cores by one or more, else empty.

    Load that may lie on cores of the machine where this process does not run is not counted.
    """
    if processor is None or processor.threads == 1:
        return ""
    threads, cores = processor.threads * processor.ranks, processor.cores
    load = max(0.0, processor.load - (processor.machine_cores - cores))
    if load + threads < cores + 1:
        return ""
    ours = f"{threads} threads of this run" + f" ({processor.ranks} ranks x {processor.threads})" * (
        processor.ranks > 1
    )
    others = f"a load of {load:.1f} by other processes and " if load >= 0.1 else ""
    return (
        f"{others}{ours} on {cores} cores: threads of a rank wait for each other, so that a step may take many times "
        "longer. OMP_NUM_THREADS=1 before the command gives each rank one thread, which waits for none"
    )


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
