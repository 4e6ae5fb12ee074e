"""A step waits for a GPU once, and copies its batch there once: counted on stand-ins, which have no values to read.

tests/gpu asks CUDA itself (`test_a_step_waits_for_the_gpu_once`).
"""

from collections import Counter
from dataclasses import fields, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megazero.engine.step.engine import Engine
from megazero.planner.trace.pretend import PretendMesh, pretend_mesh
from tests.helpers.families import of_family
from tests.helpers.table import for_each
from tests.parallel.cases import MODEL, Case, micro_batches

GPU = torch.device("meta")


class Counting(TorchDispatchMode):
    """Counts the copies to the device, and the calls that would make the process wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        made = {x.device.type for x in tree_leaves(out) if isinstance(x, torch.Tensor)}
        name = func.overloadpacket.__name__
        if name in ("copy_", "_to_copy") and given | made == {"cpu", GPU.type}:
            self.found["to the device" if GPU.type in made else "to the host"] += 1
        elif GPU.type in given and name in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique2"):
            self.found[name] += 1
        return out


class CountingNumbers(TorchFunctionMode):
    """Counts tensors made on the device of numbers on the host, which operations do not show."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor) and out.device.type == GPU.type:
            self.found["numbers to the device"] += 1
        return out


class ReadingMesh(PretendMesh):
    """Counts reads of tensors' values."""

    reads = 0

    def read(self, x: torch.Tensor) -> list[float]:
        type(self).reads += 1
        assert x.device.type == GPU.type
        return super().read(x)


SMALL = replace(MODEL, num_layers=2)
CASES = [
    Case(dp=2, zero=1, precision="bf16", model=replace(SMALL, hidden_dropout=0.1, attention_dropout=0.1)),
    Case(dp=2, tp=2, zero=3, precision="fp16", recompute="full", pa=True, grad_dtype="fp16", model=SMALL),
    Case(pp=2, zero=2, dp=4, schedule="zero-bubble", options=(("zero_shard_size", 2),), micro_batches=3, model=SMALL),
    Case(
        precision="bf16",
        reset="documents",
        recompute="selective",
        corpora=3,
        model=replace(SMALL, **of_family("llama")),
    ),
]


@for_each("case", CASES)
def test_a_step_and_an_evaluation_wait_once(case: Case) -> None:
    alone = pretend_mesh(case.layout, case.world - 1, GPU, needs_staging_buffer=False)
    mesh = ReadingMesh(**{field.name: getattr(alone, field.name) for field in fields(alone)})
    engine = Engine(case.config(), mesh, case.corpora)
    batches = micro_batches(case, mesh, 0)
    for work in (lambda: engine.train_step(1, batches), lambda: engine.evaluate(batches)):
        ReadingMesh.reads = 0
        with Counting() as counting, CountingNumbers(counting.found):
            work()
        assert (ReadingMesh.reads, counting.found) == (1, {"to the device": 1})
