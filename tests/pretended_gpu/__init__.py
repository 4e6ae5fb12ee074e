"""A pretended GPU: the program computes on the CPU, and a model of CUDA's order watches it.

Tensors are plain CPU tensors with real values, and everything is computed at once. Next to that runs a model of time:
the host, each stream and each communicator has a vector clock. An operation is ordered behind another only by its
stream, by an event, by a collective's wait, or because the host has waited. Found are races, memory freed too early,
operators that mix devices, and communicators whose members issue different operations; waits of the host are listed.

docs/pretended_gpu.md describes the model, and the faults that it cannot show.
"""

from tests.pretended_gpu.device import pretended_gpu
from tests.pretended_gpu.findings import EARLY_FREE, MIXED_DEVICES, RACE, UNMATCHED_ORDER, Finding, Findings
from tests.pretended_gpu.modes import GPU

__all__ = [
    "EARLY_FREE",
    "GPU",
    "MIXED_DEVICES",
    "RACE",
    "UNMATCHED_ORDER",
    "Finding",
    "Findings",
    "pretended_gpu",
]
