"""Report of an out-of-memory error: the memory tracker next to the estimate's prediction for the same operation."""

import resource
import sys

import torch

from megazero.engine.memory.tracker import KINDS
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.plan.program.operations import GradNorm, Op, name_of
from megazero.engine.plan.program.program import Program
from megazero.engine.step.engine import Engine
from megazero.flags.config import Config
from megazero.log import log
from megazero.planner.bytes.estimate import predicted_after

# CPU allocators raise RuntimeErrors that only their messages distinguish.
WORDS = ("not enough memory", "can't allocate memory", "out of memory", "cannot allocate memory")
MIB = 2**20


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception reports that a GPU or the host is out of memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in WORDS)


def explain_out_of_memory(error: BaseException, engine: Engine, step: Program) -> str:
    """Return a memory report for an out-of-memory error of a step's operation, and an empty text for other errors."""
    return memory_report(engine, step, engine.interpreter.current) if is_out_of_memory(error) else ""


def memory_report(engine: Engine, step: Program, op: Op | None) -> str:
    """Return a table of this rank's memory when `op` of `step` failed: by kind, now, at the peak, and as predicted.

    The prediction is for the moment after the operation. Evaluations have none.
    """
    config, mesh = engine.config, engine.mesh
    trackers, columns = [engine.tracker], ["now", "peak"]
    ops = [*step.gradients, *step.update]
    at = next((n for n, known in enumerate(ops) if known is op), None)
    if GradNorm() in step.gradients and at is not None and isinstance(config, Config):  # the options of the run
        try:
            trackers.append(
                predicted_after(
                    config, mesh.layout, mesh.rank, needs_staging_buffer=mesh.device.type == "cpu", num_ops=at + 1
                )
            )
            columns += ["predicted", "its peak"]
        except Exception as error:  # the exception that is being reported matters more
            log.error(f"no prediction for the memory report: {type(error).__name__}: {error}")
    table = [(kind, [n for t in trackers for n in (t.now[kind], t.peak[kind])]) for kind in KINDS]
    table.append(("total on the device", [n for t in trackers for n in (t.total, t.total_peak)]))
    where = f" in {name_of(op)}" if op is not None else ""
    rows = [f"memory of rank {mesh.rank}{where}, MiB:", f"{'':24}" + "".join(f"{name:>12}" for name in columns)]
    rows += [f"  {name:<22}" + "".join(f"{value / MIB:>12,.1f}" for value in values) for name, values in table]
    rows.append(f"not in the table: activations that autograd saves inside layers, and scratch; {_allocated(mesh)}")
    return "\n".join(rows)


def _allocated(mesh: Mesh) -> str:
    if mesh.device.type == "cuda":
        used, reserved = torch.cuda.memory_allocated(mesh.device), torch.cuda.memory_reserved(mesh.device)
        return f"the allocator has {used / MIB:,.1f} MiB in use of {reserved / MIB:,.1f} MiB reserved"
    return f"the process has had at most {most_resident() / MIB:,.1f} MiB resident"


def most_resident() -> int:
    """Return the peak of this process' resident memory, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def device_in_use(device: torch.device) -> tuple[int, int]:
    """Return the peak of the device memory that this process uses, and the device's size; both in bytes.

    On a GPU: the most that torch's allocator has reserved in this iteration. That is more than tensors take, and less
    than nvidia-smi shows, which counts CUDA's context and NCCL's buffers too. On a CPU: resident memory, and 0.
    """
    if device.type != "cuda":
        return most_resident(), 0
    return torch.cuda.max_memory_reserved(device), torch.cuda.get_device_properties(device).total_memory
