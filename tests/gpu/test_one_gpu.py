"""The engine on one GPU, against plain PyTorch on the CPU. Run by `make test-gpu`."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from megazero.engine.kernels.matmul import Products, writes_wide
from megazero.engine.memory.copies import StreamCopies
from megazero.engine.memory.tracker import MemoryTracker
from megazero.engine.mesh.mesh import Mesh
from megazero.engine.step.engine import Engine
from megazero.observe.fragmentation import device_fragmentation
from megazero.observe.step_metrics import memory_bytes
from tests import reference
from tests.helpers.families import of_family
from tests.helpers.fragmentation import free, ratio
from tests.parallel.cases import MODEL, STEPS, Case, micro_batches, reference_batches
from tests.parallel.test_parity import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("precision, tolerance", [("fp64", 1e-10), ("fp32", 1e-4), ("bf16", 2**-7), ("fp16", 2**-7)])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"compile": True},
        {"model": replace(MODEL, **of_family("llama"), num_query_groups=2)},
        {"recompute": "selective"},
        {"recompute": "full"},
        {"recompute": "full", "md": True},
        {"recompute": "full", "host": True},
        {"recompute": "full", "host": True, "md": True, "schedule": "gpipe"},
        {"offload": 1.0},
        {"offload": 0.5, "zero": 2, "recompute": "full", "host": True},
        {"reset": "documents"},
        {"reset": "documents", "model": replace(MODEL, **of_family("llama"), num_query_groups=2)},
    ],
    ids=str,
)
def test_one_gpu_is_the_same_model(precision: str, tolerance: float, how: dict[str, Any]) -> None:
    """Equal to 1e-4 in fp32: other kernels, which add up in another order, and four updates. TF32 stays off."""
    case = Case(**{"precision": precision, "micro_batches": 3, "model": MODEL} | how)
    losses, norms = reference.train(case.config(), reference_batches(case))
    engine = Engine(case.config(), Mesh.build(case.layout, 0, torch.device("cuda", 0)))
    found = [engine.train_step(i + 1, micro_batches(case, engine.mesh, i)) for i in range(STEPS)]
    assert relative_error([r.loss for r in found], losses) < tolerance
    assert relative_error([found[0].grad_norm], norms[:1]) < tolerance
    memory = memory_bytes(engine, found[-1])
    assert memory["peak"] >= engine.tracker.total
    assert (memory["host"] > 0) == (case.host or case.offload > 0) and (memory["activation_checkpoints"] > 0) == (
        case.recompute == "full" and not case.host
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weight_gradients_are_added_where_they_lie(dtype: torch.dtype) -> None:
    """The sum of two products in fp32, as with a temporary between them."""
    device = torch.device("cuda", 0)
    x, dy = (torch.randn(512, n, device=device).to(dtype) for n in (192, 320))
    found, wanted = torch.empty(320, 192, device=device), torch.empty(320, 192, device=device)
    for add in (False, True):
        Products(in_place=writes_wide(device, dtype)).weight_grad(x, dy, found, add)
        Products().weight_grad(x, dy, wanted, add)
    assert writes_wide(device, dtype)
    exact = 2 * (dy.double().t() @ x.double())
    for result in (found, wanted):
        assert float((result - exact).abs().max() / exact.abs().max()) < 1e-5  # sums of 512 in fp32


class OneRead(Mesh):
    """Lets the process wait for the GPU in `read`, and nowhere else."""

    reads = 0

    def read(self, x: torch.Tensor) -> list[float]:
        torch.cuda.set_sync_debug_mode("default")
        try:
            type(self).reads += 1
            return super().read(x)
        finally:
            torch.cuda.set_sync_debug_mode("error")


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"model": replace(MODEL, hidden_dropout=0.1, attention_dropout=0.1)},
        {"zero": 3, "recompute": "full", "host": True, "md": True},
        {"precision": "fp16", "grad_dtype": "fp16", "recompute": "selective"},
        {"reset": "documents", "model": replace(MODEL, **of_family("llama"), num_query_groups=2)},
    ],
    ids=str,
)
def test_a_step_waits_for_the_gpu_once(how: dict[str, Any]) -> None:
    """CUDA raises at any other wait: see Note [one wait]. unit/engine/mesh/test_host_waits.py counts on stand-ins."""
    case = Case(**{"precision": "bf16", "micro_batches": 3} | how)
    mesh = OneRead(**vars(Mesh.build(case.layout, 0, torch.device("cuda", 0))))
    engine = Engine(case.config(), mesh)
    batches = micro_batches(case, mesh, 0)
    engine.train_step(1, batches)  # makes everything that is made once: kernels' workspaces, page-locked buffers
    for work in (lambda: engine.train_step(2, batches), lambda: engine.evaluate(batches)):
        OneRead.reads = 0
        torch.cuda.set_sync_debug_mode("error")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert OneRead.reads == 1


def test_copies_to_the_host_and_back() -> None:
    """The copy that comes back is equal, though copies are slow and the memory is reused at once."""
    device, numel = torch.device("cuda", 0), 1 << 22
    copies = StreamCopies(numel, torch.float32, device, MemoryTracker(), Counter())
    stored, wanted = [], []
    for i in range(4):
        x = torch.full((numel,), float(i), device=device)
        wanted.append(float(i))
        with torch.cuda.stream(copies.link.storing):
            torch.cuda._sleep(10_000_000)
        stored.append(copies.start_store(x, torch.empty(numel, pin_memory=True)))
        x.zero_()
    fetch = copies.start_fetch(stored[3])
    for i in (3, 2, 1, 0):
        following = copies.start_fetch(stored[i - 1]) if i else fetch
        assert bool((fetch.wait() == wanted[i]).all())
        fetch = following


def test_a_fetch_runs_behind_the_computation() -> None:
    """It is done while the computation, busy since, is not."""
    device, numel = torch.device("cuda", 0), 1 << 20
    copies = StreamCopies(numel, torch.float32, device, MemoryTracker(), Counter())
    stored = copies.start_store(torch.ones(numel, device=device), torch.empty(numel, pin_memory=True))
    torch.cuda.synchronize()
    fetch = copies.start_fetch(stored)
    torch.cuda._sleep(2_000_000_000)
    busy = torch.cuda.current_stream(device).record_event()
    assert fetch.done is not None
    fetch.done.synchronize()
    assert not busy.query()
    assert bool((fetch.wait() == 1).all())


def test_fragmentation_is_the_allocators_own_count() -> None:
    """Against torch's counters, with a hole that a freed tensor leaves between two others."""
    device, size = torch.device("cuda", torch.cuda.current_device()), 32 << 20
    torch.cuda.empty_cache()
    whole = torch.empty(3 * size, dtype=torch.uint8, device=device)  # one segment, to be cut in three
    del whole
    parts = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(3)]
    del parts[1]
    found = device_fragmentation(device)
    assert found is not None
    assert found.reserved == torch.cuda.memory_reserved(device)
    assert found.allocated == torch.cuda.memory_stats(device)["active_bytes.all.current"]
    assert size <= found.largest_free <= free(found)
    assert 0 <= ratio(found) < 1
