"""Enter a pretended GPU: the functions of torch that are replaced, and by which."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megazero.engine.mesh import groups
from megazero.engine.mesh.collectives import Axis
from megazero.engine.step.interpreter import Interpreter
from tests.pretended_gpu.attention import attention, varlen_attention
from tests.pretended_gpu.findings import Findings
from tests.pretended_gpu.modes import Placing, Session, Watching

INIT_PROCESS_GROUP = dist.init_process_group
CAPACITY = 85 << 30  # bytes of its memory


@contextmanager
def pretended_gpu(capability: tuple[int, int] = (9, 0)) -> Iterator[Findings]:
    """Pretend, within, that `torch.device("cuda", 0)` is a GPU; all ranks of a group call this together.

    Note [backward]: torch leaves a function mode while it handles `torch.autograd.grad`, and with it for the Functions
    that backward calls. `_engine_run_backward`, private to torch, is the place at which the mode is entered again.
    """
    from torch.nn.attention import varlen  # with torch._dynamo: two CPU seconds, which other tests need not take

    session = Session()
    with ExitStack() as stack:
        for name, stand_in in _cuda(session, capability).items():
            stack.enter_context(patch.object(torch.cuda, name, stand_in))
        placing, run_backward = Placing(session), torch.autograd._engine_run_backward

        def backward(*args: Any, **kwargs: Any) -> Any:
            with placing:
                return run_backward(*args, **kwargs)

        execute = Interpreter.execute

        def noting(interpreter: Interpreter, ops: Any) -> None:
            session.interpreter = interpreter
            execute(interpreter, ops)

        def launch(*args: Any, **kwargs: Any) -> Any:
            return session.communicators.launch(*args, **kwargs)

        for owner, name, stand_in in (
            (torch.autograd, "_engine_run_backward", backward),
            (Interpreter, "execute", noting),
            (Axis, "_launch", launch),
            (Axis, "needs_staging_buffer", property(lambda axis: False)),
            (dist, "init_process_group", _init_process_group),
            (dist, "split_group", session.communicators.split_group),
            (dist, "all_gather", session.communicators.all_gather),
            (dist, "reduce_scatter", session.communicators.reduce_scatter),
            (groups, "_urgent_options", lambda: None),
            (varlen, "varlen_attn", varlen_attention(session, capability)),
            (F, "scaled_dot_product_attention", attention(F.scaled_dot_product_attention)),
        ):
            stack.enter_context(patch.object(owner, name, stand_in))
        stack.enter_context(placing)
        stack.enter_context(Watching(session))
        stack.callback(setattr, session.memory, "closed", True)
        yield session.findings
        session.communicators.ledger.close()


def _init_process_group(backend: str, device_id: torch.device | None = None, **options: Any) -> None:
    """Stand in for `dist.init_process_group`: gloo for NCCL."""
    INIT_PROCESS_GROUP("gloo" if backend == "nccl" else backend, **options)


def _cuda(session: Session, capability: tuple[int, int]) -> dict[str, Callable[..., Any]]:
    """Return functions of `torch.cuda` as a machine with an idle GPU per rank has them."""
    memory, streams = session.memory, session.streams
    properties = SimpleNamespace(total_memory=CAPACITY, major=capability[0], minor=capability[1])
    properties.multi_processor_count = 132
    properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id = (
        0xFFFF,
        0,
        0,
    )  # no device of this machine

    def set_device(device: int | torch.device) -> None:
        session.device = torch.device("cuda", device) if isinstance(device, int) else device

    def reset_peak(device: Any = None) -> None:
        memory.peak = memory.allocated

    return {
        "is_available": lambda: True,
        "device_count": lambda: int(os.environ.get("WORLD_SIZE", "1")),
        "current_device": lambda: session.device.index,
        "set_device": set_device,
        "get_device_name": lambda device=None: "a pretended GPU",
        "get_device_capability": lambda device=None: capability,
        "get_arch_list": lambda: [f"sm_{capability[0]}{capability[1]}"],
        "get_device_properties": lambda device=None: properties,
        "is_bf16_supported": lambda including_emulation=True: including_emulation or capability >= (8, 0),
        "mem_get_info": lambda device=None: (CAPACITY - memory.allocated, CAPACITY),
        "memory_allocated": lambda device=None: memory.allocated,
        "memory_reserved": lambda device=None: memory.allocated,
        "max_memory_allocated": lambda device=None: memory.peak,
        "max_memory_reserved": lambda device=None: memory.peak,
        "memory_snapshot": list,
        "_sleep": lambda cycles: None,
        "reset_peak_memory_stats": reset_peak,
        "Stream": streams.new_stream,
        "Event": streams.new_event,
        "stream": streams.on,
        "current_stream": streams.current_stream,
        "synchronize": streams.synchronize,
    }
