"""Report of memory that ran out: the memory tracker beside the estimate's prediction for the same operation."""

from __future__ import annotations

import resource
import sys

import torch

from megazero.comm.mesh.mesh import Mesh
from megazero.config.schema import Config
from megazero.log import log
from megazero.memory.tracker import KINDS, MemoryTracker
from megazero.plan.program.operations import Op, name_of
from megazero.plan.program.program import Program
from megazero.price.bytes.estimate import predicted_after

# What a CPU allocator says, in plain RuntimeErrors: told by their words alone.
WORDS = ("not enough memory", "can't allocate memory", "out of memory", "cannot allocate memory")
MIB = 2**20


def is_out_of_memory(error: BaseException) -> bool:
    """Return true if an exception says that memory ran out, of a GPU or of the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in WORDS)


def memory_report(config: Config, mesh: Mesh, tracker: MemoryTracker, step: Program, op: Op | None) -> str:
    """Tell what this rank held when `op` of `step` ran out of memory, by kind, now and at its peak, and as predicted.

    The prediction is for the moment after the operation. It is left out for an evaluation, and where it fails: this
    report is made while another exception is being raised.
    """
    expected: MemoryTracker | None = None
    ops = [*step.gradients, *step.update]
    at = next((n for n, known in enumerate(ops) if known is op), None)
    if step.trains and at is not None:
        try:
            expected = predicted_after(config, mesh.layout, mesh.rank, mesh.device.type == "cpu", at + 1)
        except Exception as error:  # the one that is being reported matters more
            log.error(f"no prediction for the memory report: {type(error).__name__}: {error}")
    where = f" in {name_of(op)}" if op is not None else ""
    columns = ["now", "peak", *(["predicted", "its peak"] if expected is not None else [])]
    rows = [f"memory of rank {mesh.rank}{where}, MiB:", f"{'':24}" + "".join(f"{name:>12}" for name in columns)]
    for kind in KINDS:
        values = [tracker.now[kind], tracker.peak[kind]]
        values += [expected.now[kind], expected.peak[kind]] if expected is not None else []
        rows.append(f"  {kind:<22}" + "".join(f"{value / MIB:>12,.1f}" for value in values))
    totals = [tracker.total, tracker.total_peak]
    totals += [expected.total, expected.total_peak] if expected is not None else []
    rows.append(f"  {'total on the device':<22}" + "".join(f"{value / MIB:>12,.1f}" for value in totals))
    rows.append(f"not in the table: activations that autograd keeps inside layers, and scratch; {_allocated(mesh)}")
    return "\n".join(rows)


def _allocated(mesh: Mesh) -> str:
    if mesh.device.type == "cuda":
        used, reserved = torch.cuda.memory_allocated(mesh.device), torch.cuda.memory_reserved(mesh.device)
        return f"the allocator has {used / MIB:,.1f} MiB in use of {reserved / MIB:,.1f} MiB reserved"
    return f"the process has had at most {most_resident() / MIB:,.1f} MiB resident"


def most_resident() -> int:
    """Return the most bytes of host memory that this process has had at one time."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def device_in_use(device: torch.device) -> tuple[int, int]:
    """Return the most bytes of its device that this process has used at one time, and the device's own (0: a CPU).

    Of a GPU what torch's allocator has reserved, in this iteration: more than what tensors take, less than what
    nvidia-smi shows, which counts CUDA's context and NCCL's buffers too. Of a CPU the process' resident memory.
    """
    if device.type != "cuda":
        return most_resident(), 0
    return torch.cuda.max_memory_reserved(device), torch.cuda.get_device_properties(device).total_memory
