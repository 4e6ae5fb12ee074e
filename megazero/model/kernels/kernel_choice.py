"""Choice of the fused kernels: --fused-kernels auto is triton where it works, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from megazero.comm.mesh.collectives import MAX
from megazero.comm.mesh.mesh import Mesh
from megazero.config.schema import Config
from megazero.model.kernels.dropout import Dropout, Rows
from megazero.model.kernels.table import EAGER, TRITON


def choose_kernels(
    config: Config, mesh: Mesh, complaint: Callable[[torch.device], str] | None = None
) -> tuple[Config, str]:
    """Replace `auto` by eager where Triton does not work, on all ranks alike; and what to say about it, if anything.

    Elsewhere it stays: a run's configuration is then right for another device too.

    Args:
        complaint: of a device: why Triton does not work there, or nothing; None: `triton_complaint`.

    Raises:
        ValueError: triton is asked for and does not work on some rank's device.
    """
    training = config.training
    if training.kernels_on(mesh.device.type) == "eager" or mesh.device.type == "meta":  # a GPU that is not there
        return config, ""
    reason = (complaint or triton_complaint)(mesh.device)
    failed = torch.tensor(float(bool(reason)), dtype=torch.float64, device=mesh.device)
    if not float(mesh.world.all_reduce_(failed, op=MAX, kind="control")):
        return config, "--fused-kernels triton: fewer passes over memory; eager takes torch's operators"
    reason = f"Triton does not work {f'here ({reason})' if reason else 'on another rank'}"
    if training.fused_kernels == "triton":
        raise ValueError(f"--fused-kernels triton: {reason}; use auto or eager")
    said = f"--fused-kernels eager: {reason}; a step takes longer"
    return replace(config, training=replace(training, fused_kernels="eager")), said


def triton_complaint(device: torch.device) -> str:
    """Run a kernel on this device; returns why that failed, or nothing. The first time, this compiles it."""
    rows, x = (Rows(0, 0, 8),), torch.ones(8, 64, device=device)
    try:
        if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
            return "it needs a GPU of compute capability 8.0"
        ours, theirs = (Dropout(0.5, 0, 0, "trial", k.dropout).mask(x, rows) for k in (TRITON, EAGER))
        same = torch.equal(ours, theirs)
    except Exception as error:
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return "" if same else "its mask is not torch's"
