"""Settings of torch's libraries that only environment variables reach, and only before torch is imported.

Note [spinning threads]: at the end of each parallel loop GNU OpenMP's threads spin, by default for milliseconds,
before they sleep. Where another process needs the core, the thread that is waited for does not get it: with four busy
processes on two cores a step takes many times longer. Spinning for microseconds costs an idle machine nothing
(docs/results/benchmarks.md has the measurements).

Note [pinned memory]: torch rounds pinned allocations up to a power of two, unless they are larger than
pinned_max_round_threshold_mb. In torch 2.13 the cache of freed blocks, one list per power of two, hands out a block
that was not rounded without looking at its size, so that copies write behind its end. A limit is safe only if
pinned_max_cached_size_mb is the same: then no such block is cached. Whether releases before 2.13 have the second limit
is not known.
"""

import os
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
LIMITED_PINNED = (2, 13)  # the first release that is known to have both limits
ROUND, CACHED = "pinned_max_round_threshold_mb", "pinned_max_cached_size_mb"


class Default(NamedTuple):
    """A variable, its default here, and another variable with which a user decides the same."""

    variable: str
    value: str
    other: str = ""


DEFAULTS = (
    Default("GOMP_SPINCOUNT", "1000", "OMP_WAIT_POLICY"),  # Note [spinning threads]
    # Segments of GPU memory that grow instead of leaving gaps.
    Default(ALLOCATOR, "expandable_segments:True", "PYTORCH_ALLOC_CONF"),
    # Hardware queues of a GPU, 8 by default: a rank of a pipeline has up to 16 streams, and streams that share a queue
    # wait for each other.
    Default("CUDA_DEVICE_MAX_CONNECTIONS", "32"),
    # A record of the last NCCL calls, which a time-out writes to files that `torchfrtrace` reads.
    Default("TORCH_FR_BUFFER_SIZE", "2000"),
    Default("TORCH_NCCL_DUMP_ON_TIMEOUT", "1"),
)


def set_defaults() -> None:
    """Set each variable of DEFAULTS that the user has not set. Call it before torch is imported."""
    for variable, value, other in DEFAULTS:
        if other not in os.environ:
            limits = f",{ROUND}:64,{CACHED}:64" if variable == ALLOCATOR and _torch_version() >= LIMITED_PINNED else ""
            os.environ.setdefault(variable, value + limits)


def check_allocator_settings() -> None:
    """Refuse settings under which torch's pinned allocator returns too small a block: Note [pinned memory].

    Raises:
        ValueError: the user's limits differ.
    """
    for variable in (ALLOCATOR, "PYTORCH_ALLOC_CONF"):
        settings = dict(word.partition(":")[::2] for word in os.environ.get(variable, "").split(","))
        if settings.get(ROUND) != settings.get(CACHED) and ROUND in settings:
            raise ValueError(
                f"{variable} has {ROUND}:{settings[ROUND]} without {CACHED}:{settings[ROUND]}: torch then overwrites "
                "host memory; give both the same power of two, or neither"
            )


def _torch_version() -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in version("torch").split(".")[:2])
    except (PackageNotFoundError, ValueError):
        return (0,)
