"""Sharded checkpoints that any layout can load: saved once by all ranks, committed by a rename, proven whole.

Begin with `api`.
"""

from megazero.checkpoint.api import find, load, lock, read_state, save
from megazero.checkpoint.background import BackgroundSaver, slow_group
from megazero.checkpoint.folders import checkpoints, prune
from megazero.checkpoint.in_memory import InMemory, MemoryCheckpoints
from megazero.checkpoint.manifest import Damaged
from megazero.checkpoint.shared_outcome import AgreedFailure, from_rank, together

__all__ = [
    "AgreedFailure",
    "BackgroundSaver",
    "Damaged",
    "InMemory",
    "MemoryCheckpoints",
    "checkpoints",
    "find",
    "from_rank",
    "load",
    "lock",
    "prune",
    "read_state",
    "save",
    "slow_group",
    "together",
]
