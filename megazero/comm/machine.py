"""The memory that a rank's device and its node have for the run."""

from __future__ import annotations

import os
import re

import torch

from megazero.comm.launch import World
from megazero.memory.host import Available, Machine, host_memory

# Beginnings of the names of such variables. None of them is a secret.
TOLD = ("CUBLAS_", "CUDA_VISIBLE", "GLOO_", "MASTER_", "MKL_", "NCCL_", "OMP_", "PYTORCH_", "TORCH_", "TORCHINDUCTOR_")
TOLD += ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_RESTART_COUNT")


def machine(world: World, device: torch.device) -> Machine:
    """Look at the memory of this rank's device and of its node."""
    free = None
    if device.type == "cuda":
        free = Available(torch.cuda.mem_get_info(device)[0], "free on its GPU")
    first = world.rank - world.local_rank  # launchers number the ranks of a node in one row
    ranks = range(max(0, first), min(first + local_size(world), world.size))
    return Machine(ranks, device.type, free, host_memory())


def environment() -> dict[str, str]:
    """Return the variables of this process' environment that change how a run computes or communicates."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(TOLD)}


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def local_size(world: World) -> int:
    """Return the number of ranks on this node; 1 where the launcher does not say."""
    env = os.environ
    if world.launcher == "srun":
        node = env.get("SLURM_NODEID", "0")
        return tasks_of_node(env.get("SLURM_STEP_TASKS_PER_NODE", ""), int(node) if node.isdecimal() else 0)
    size = env.get("LOCAL_WORLD_SIZE", "1") if world.launcher == "torchrun" else "1"
    return int(size) if size.isdecimal() else 1


def tasks_of_node(tasks_per_node: str, node: int) -> int:
    """Return the number of tasks on a node by SLURM's list, such as "4(x2),3"; 1 if there is no such list."""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks_per_node):
        counts += [int(count)] * min(int(times or 1), node + 1)
    return counts[node] if node < len(counts) else 1
