"""Start and stop of a rank: what launched it, its device, how a failure is told to the others."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import sys
import time
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist

FAILURE_KEY = "megazero/failure"  # in the rendezvous store: what the first rank to fail said


class World(NamedTuple):
    """What this process was started as."""

    rank: int
    size: int
    local_rank: int  # on its node: which of the node's devices is its own
    launcher: str  # torchrun, srun or single


def read_world() -> World:
    """From torchrun's variables, else from those of an srun step, else a single process.

    A plain process inside a batch script or an salloc shell is single: only a step's tasks have peers.
    """
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        return World(int(env["RANK"]), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", 0)), "torchrun")
    size = int(env.get("SLURM_STEP_NUM_TASKS", 1))  # SLURM_NTASKS is set in a batch shell too
    if size > 1:
        if not ("MASTER_ADDR" in env and "MASTER_PORT" in env):
            raise ValueError(
                f"srun started {size} tasks, but MASTER_ADDR and MASTER_PORT are not set; "
                "use scripts/slurm/pretrain.sbatch, or export both before srun"
            )
        return World(int(env["SLURM_PROCID"]), size, int(env["SLURM_LOCALID"]), "srun")
    return World(0, 1, 0, "single")


def pick_device(world: World) -> torch.device:
    """This rank's own GPU where there are GPUs, else the CPU.

    Raises:
        ValueError: more ranks on this node than GPUs.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if world.launcher == "torchrun" and world.local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {world.local_rank} has no GPU of its own: there are {torch.cuda.device_count()} here; "
            "start as many ranks on a node as it has GPUs (--nproc)"
        )
    index = world.local_rank % torch.cuda.device_count()  # srun with --gpus-per-task shows a task only its own
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def start(world: World, device: torch.device, timeout_minutes: float) -> None:
    """Join the other ranks: NCCL on GPUs, gloo on CPU. A single process needs no group."""
    if world.size > 1:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            rank=world.rank,
            world_size=world.size,
            timeout=datetime.timedelta(minutes=timeout_minutes),
            device_id=device if device.type == "cuda" else None,
        )


def stop() -> None:
    """Leave in good order; a gloo process that ends without this sometimes aborts on its way out."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def leave(code: int) -> NoReturn:
    """End this process after a failure: at once, for the others may wait for it, and without the backend's own
    clean-up, which can hang on them or replace the exit code by an abort's.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def report_failure(world: World, message: str) -> None:
    """Leave this rank's message where the others find it, and where torchrun does. Never raises, never waits."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")  # what is in there is in torchrun's last words
    if path:
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
    if dist.is_initialized():
        try:
            store = dist.distributed_c10d._get_default_store()
            store.compare_set(FAILURE_KEY, "", f"rank {world.rank}: {message}")  # the first one stays
        except Exception as error:  # the store goes with the rank that hosts it: then there is nobody to tell
            print(f"rank {world.rank}: could not tell the others: {error}", file=sys.stderr)


def reported_failure() -> str | None:
    """What the rank that failed first said, if it could."""
    try:
        store = dist.distributed_c10d._get_default_store()
        return store.get(FAILURE_KEY).decode() if store.check([FAILURE_KEY]) else None
    except Exception:
        return None
