"""Settings of torch's libraries that only environment variables reach, and only before torch is imported.

Note [spinning threads]: at the end of each parallel loop GNU OpenMP's threads spin, by default for milliseconds,
before they sleep. Where another process needs the core, the thread that is waited for does not get it: with four busy
processes on two cores a step takes ten times longer. Spinning for microseconds costs an idle machine nothing
(docs/log.md has the measurements).

Note [pinned memory]: torch rounds pinned allocations up to a power of two, unless they are larger than
pinned_max_round_threshold_mb. In torch 2.13 the cache of freed blocks, one list per power of two, hands out a block
that was not rounded without looking at its size. No such block is cached where pinned_max_cached_size_mb is the same.
"""

from __future__ import annotations

import os
from typing import NamedTuple


class Default(NamedTuple):
    """A variable, its default here, and another variable with which a user decides the same."""

    variable: str
    value: str
    other: str = ""


DEFAULTS = (
    Default("GOMP_SPINCOUNT", "1000", "OMP_WAIT_POLICY"),  # Note [spinning threads]
    # Segments of GPU memory that grow instead of leaving gaps; Note [pinned memory].
    Default(
        "PYTORCH_CUDA_ALLOC_CONF",
        "expandable_segments:True,pinned_max_round_threshold_mb:64,pinned_max_cached_size_mb:64",
        "PYTORCH_ALLOC_CONF",
    ),
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
        if not other or other not in os.environ:
            os.environ.setdefault(variable, value)
