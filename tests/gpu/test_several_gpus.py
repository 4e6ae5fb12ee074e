"""Layouts of two and more GPUs over NCCL, against plain PyTorch on the CPU. Run by `make test-gpu`."""

import datetime
import queue
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megazero.engine.mesh.mesh import Mesh
from tests import reference
from tests.parallel.cases import STEPS, Case, global_batch, train_on
from tests.parallel.test_parity import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
]

CASES = [
    *(Case(dp=2, zero=z, micro_batches=3) for z in range(4)),
    Case(dp=2, zero=3, micro_batches=3, options=(("overlap_comm", False),)),
    Case(dp=2, zero=3, recompute="full", micro_batches=3, options=(("reduce_bucket_size", 1000),)),
    Case(tp=2),
    Case(cp=2, zero=1, micro_batches=3),
    Case(cp=2, recompute="selective"),
    Case(tp=2, sp=True, recompute="selective"),
    Case(tp=2, recompute="full", pa=True, host=True),
    Case(pp=2, micro_batches=1),
    *(Case(pp=2, micro_batches=3, schedule=name) for name in ("1f1b", "gpipe", "zero-bubble")),
    *(Case(pp=2, micro_batches=4, schedule=name, chunks=2) for name in ("interleaved", "zero-bubble-v")),
    *(Case(pp=2, dp=2, zero=z, micro_batches=3) for z in (1, 3)),
    Case(dp=4, zero=2, micro_batches=3, options=(("zero_shard_size", 2),)),
    Case(pp=2, tp=2, sp=True, recompute="full", micro_batches=3),
]


def rank_main(rank: int, port: int, case: Case, answers: Any) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=case.world,
        timeout=datetime.timedelta(seconds=60),
        device_id=torch.device("cuda", rank),
    )
    answers.put((rank, train_on(Mesh.build(case.layout, rank, torch.device("cuda", rank), 1.0), case)))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_several_gpus_are_the_same_model(case: Case) -> None:
    """Equal to 1e-4 in fp32: other kernels, which add up in another order, and updates. TF32 stays off."""
    if torch.cuda.device_count() < case.world:
        pytest.skip(f"{case.world} GPUs are needed, and there are {torch.cuda.device_count()}")
    losses, norms = reference.train(case.config(), [global_batch(case, step) for step in range(STEPS)])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # binds to a free port
    port = store.port
    del store
    context = mp.get_context("spawn")
    answers = context.Queue()
    ranks = mp.spawn(rank_main, (port, case, answers), nprocs=case.world, join=False)
    found: dict[int, Any] = {}
    while len(found) < case.world:
        try:
            rank, outcome = answers.get(timeout=1)
            found[rank] = outcome
        except queue.Empty:
            ranks.join(timeout=0)  # raises a rank's exception
    while not ranks.join():
        pass
    for outcome in found.values():
        assert relative_error(outcome.losses, losses) < 1e-4
        assert relative_error(outcome.norms[:1], norms[:1]) < 1e-4
