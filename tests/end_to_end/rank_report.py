"""A stand-in for pretrain_gpt.py: all it has of it is a start-up, an all-reduce and an exit code.

Started alone, by torchrun or by srun, each rank prints one line of JSON, in which `total` is the sum of
rank + 1 over all ranks. Flags that it does not know are pretrain_gpt.py's, and ignored.
"""

import argparse
import datetime
import json
import os
import resource
import signal
import socket
import sys
import time
from pathlib import Path


def coordinates() -> tuple[int, int, int]:
    """(rank, world size, local rank)."""
    env = os.environ
    if "RANK" in env:
        return int(env["RANK"]), int(env["WORLD_SIZE"]), int(env["LOCAL_RANK"])
    if "SLURM_STEP_NUM_TASKS" in env:  # SLURM_NTASKS is set in a batch script as well, before any srun
        return int(env["SLURM_PROCID"]), int(env["SLURM_STEP_NUM_TASKS"]), int(env["SLURM_LOCALID"])
    return 0, 1, 0


def sum_of_ranks(rank: int, world_size: int) -> int:
    import torch
    import torch.distributed as dist

    total = torch.tensor(rank + 1)
    timeout = datetime.timedelta(seconds=600)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timeout)
    dist.all_reduce(total)
    dist.destroy_process_group()  # a gloo that is still up at exit may abort, with any exit code
    return int(total)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fail-rank", type=int, help="the rank that exits with --fail-code")
    parser.add_argument("--fail-code", type=int, default=1)
    parser.add_argument("--gate", type=Path, help="a folder: the failing rank waits until all have reported there")
    parser.add_argument("--alone", action="store_true", help="sum nothing, which needs no torch")
    parser.add_argument("--hang", action="store_true", help="then all other ranks wait, until a TERM")
    args, _ = parser.parse_known_args()

    rank, world_size, local_rank = coordinates()
    total = rank + 1 if world_size == 1 or args.alone else sum_of_ranks(rank, world_size)
    report = {"rank": rank, "world_size": world_size, "local_rank": local_rank, "total": total}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    report |= {"open_files": soft, "most_open_files": hard}
    report |= {"host": socket.gethostname(), "argv": sys.argv[1:], "tty": sys.stdout.isatty()}
    for name in (
        "SLURM_CPU_BIND_TYPE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "OMP_NUM_THREADS",
        "CUDA_VISIBLE_DEVICES",
        "TORCH_FR_DUMP_TEMP_FILE",
        "SLURM_JOB_NAME",
        "NCCL_IB_HCA",
        "IN_IMAGE",
        "FROM_ARGS",
    ):
        report[name] = os.environ.get(name)
    print(json.dumps(report), flush=True)

    if args.gate:
        args.gate.mkdir(exist_ok=True)
        (args.gate / str(rank)).touch()
    if rank == args.fail_rank:
        while args.gate and len(list(args.gate.iterdir())) < world_size:
            time.sleep(0.05)
        print(f"rank {rank} fails", file=sys.stderr, flush=True)
        return args.fail_code
    if args.hang:
        signal.signal(signal.SIGUSR1, lambda *_: print(f"rank {rank} got USR1", flush=True))
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(f"rank {rank} got TERM"))
        print("waiting", flush=True)
        while True:
            time.sleep(0.1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
