"""Sharded checkpoints that any layout can load: saved once by all ranks, published by a rename, proven whole.

The only package beside `mesh` that may import torch.distributed.
"""

from megazero.checkpoint.engine import find, load, save
from megazero.checkpoint.folders import prune
from megazero.checkpoint.manifest import read_state
from megazero.checkpoint.shards import LocalShard

__all__ = ["LocalShard", "find", "load", "prune", "read_state", "save"]
