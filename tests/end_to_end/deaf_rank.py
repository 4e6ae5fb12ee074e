"""One of two ranks, RANK, fails when the other is where no exception reaches it, as in a kernel of NCCL."""

import sys
import threading

import torch
import torch.distributed as dist

from megazero.cluster import failures, launch
from megazero.log import log_as
from megazero.world import read_world

world = read_world()
log_as(world.rank, world.size)
launch.start(world, torch.device("cpu"), 1.0)
store = dist.distributed_c10d._get_default_store()
if world.rank == int(sys.argv[1]):
    store.wait(["watching"])
    failures.report_failure(world, "error: --data-path: a bad token")
    launch.exit_now(3)
try:
    with failures.ending_with_peers(world, seconds=0.5, patience=0.1):
        store.set("watching", "")
        threading.Event().wait()
finally:
    print("unwound")  # the process ends without
