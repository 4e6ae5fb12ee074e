"""Findings of the pretended GPU: faults of order or place that CUDA would not report."""

from collections import Counter
from typing import NamedTuple

RACE = "race"  # two accesses of the same bytes, one a write, that nothing orders
EARLY_FREE = "early free"  # memory that the allocator hands out again while another stream uses it
MIXED_DEVICES = "mixed devices"  # an operator that is given tensors of the host and of the device
UNMATCHED_ORDER = "unmatched order"  # the members of a communicator issue different operations


class Finding(NamedTuple):
    """One kind of fault, with the operators, streams and operations of the program that it is about."""

    kind: str
    text: str


class Findings:
    """Everything found in one session.

    Attributes:
        found: finding -> how often it occurred.
        waits: the operators for which the host waited for the device, in order.
    """

    def __init__(self) -> None:
        self.found: Counter[Finding] = Counter()
        self.waits: list[str] = []

    def report(self, kind: str, text: str) -> None:
        self.found[Finding(kind, text)] += 1

    def of_kind(self, kind: str) -> list[str]:
        return [finding.text for finding in self.found if finding.kind == kind]
