"""The memory of a rank's device and node, the CPUs near the device, and the environment of the run."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from megazero.files import explain
from megazero.host import Available, Machine, host_memory, near_cpus
from megazero.world import World, local_size

# Prefixes of variables that change a run. None of them is a secret.
SHOWN = ("CUBLAS_", "CUDA_VISIBLE", "GLOO_", "MASTER_", "MKL_", "NCCL_", "OMP_", "PYTORCH_", "TORCH_", "TORCHINDUCTOR_",
    "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_RESTART_COUNT")  # fmt: skip


def machine(world: World, device: torch.device, folder: str = "") -> Machine:
    """Return the free memory of this rank's device and of its node, and the free space in `folder`.

    Raises:
        ValueError: the folder cannot be written; it is that of --optimizer-nvme-offload.
    """
    free, memory = None, host_memory(whole=True)
    whole = memory.num_bytes if memory is not None else None
    if device.type == "cuda":
        left, whole = torch.cuda.mem_get_info(device)
        free = Available(left, "free on its GPU")
    first = world.rank - world.local_rank  # launchers number the ranks of a node consecutively
    ranks = range(max(0, first), min(first + local_size(world), world.size))
    return Machine(
        ranks=ranks,
        device_type=device.type,
        device=free,
        host=host_memory(),
        whole=whole,
        files=_free_space(folder) if folder else None,
    )


def _free_space(folder: str) -> Available:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return Available(shutil.disk_usage(folder).free, f"free in {folder}")
    except OSError as error:
        raise ValueError(f"--optimizer-nvme-offload {folder}: {explain(error)}") from None


def bind_to_near_cpus(device: torch.device, root: Path = Path("/")) -> None:
    """Bind this process to the allowed CPUs of its GPU's NUMA node, if there are any.

    Page-locked memory is then allocated on that node, and copies do not cross sockets. Existing threads keep their
    CPUs, so call this before torch computes.

    Args:
        root: the folder that holds sys/.
    """
    gpu: Any = torch.cuda.get_device_properties(device)  # torch declares no type of its addresses
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    if near := near_cpus(address, root) & os.sched_getaffinity(0):
        os.sched_setaffinity(0, near)


def environment() -> dict[str, str]:
    """Return the variables of this process' environment that change how a run computes or communicates."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(SHOWN)}
